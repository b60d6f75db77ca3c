"""The style sheet of a trace, for light and dark mode and from phone width up. Nothing is
fetched."""

STYLE = """
.adt{--ground:#fff;--ink:#1d2127;--faint:#69707a;--line:#dfe3e8;--panel:#f6f7f9;--bad:#b3261e;
--s0:#bfe3c8;--s1:#c3dafa;--s2:#f6d9a8;--s3:#e5c8f2;--s4:#b9e6e6;--s5:#f4c9d3;--verify:#8aa4c8;
--draft:#e09a3e;background:var(--ground);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;padding:1rem clamp(.8rem,4vw,3rem) 3rem}
@media(prefers-color-scheme:dark){.adt{--ground:#14171b;--ink:#e4e7eb;--faint:#98a1ac;
--line:#333a42;--panel:#1d2126;--bad:#ff8a80;--s0:#1f5a34;--s1:#1f4678;--s2:#6b4a10;--s3:#5a2f70;
--s4:#155a5c;--s5:#702f40;--verify:#5f7ba3;--draft:#c98430}}
.adt *{box-sizing:border-box}
.adt main{max-width:75rem;margin:auto}
.adt h1{font-size:1.3rem;margin:.2rem 0 .6rem}
.adt h2{font-size:1rem;margin:1.8rem 0 .5rem}
.adt .stats{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:0}
.adt .stats div{display:flex;flex-direction:column-reverse}
.adt .stats dt{color:var(--faint);font-size:.8rem}
.adt .stats dd{margin:0;font-size:1.25rem;font-variant-numeric:tabular-nums}
.adt .legend{display:flex;flex-wrap:wrap;gap:.3rem 1rem;color:var(--faint);font-size:.85rem}
.adt .key{border-radius:3px;padding:0 .35em;color:var(--ink)}
.adt .text{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--panel);
border:1px solid var(--line);border-radius:6px;padding:.8rem 1rem;line-height:1.75}
.adt .text a{color:inherit;text-decoration:none;border-radius:3px}
.adt .text a:hover{outline:2px solid var(--verify)}
.adt .s0{background:var(--s0)}.adt .s1{background:var(--s1)}.adt .s2{background:var(--s2)}
.adt .s3{background:var(--s3)}.adt .s4{background:var(--s4)}.adt .s5{background:var(--s5)}
.adt .no{color:var(--bad);text-decoration:line-through;font-size:.82em}
.adt .hide:not(:checked)~.text .no{display:none}
.adt .bars{display:flex;align-items:flex-end;height:7rem;border-bottom:1px solid var(--line);
gap:1px}
.adt .bars a{flex:1 1 0;min-width:0;max-width:1.6rem;display:flex;flex-direction:column;
justify-content:flex-end;height:100%}
.adt .bars i{display:block;background:var(--verify)}
.adt .bars i.d{background:var(--draft)}
.adt .bars a:hover i{filter:brightness(1.25)}
.adt ol{list-style:none;margin:0;padding:0}
.adt .passes>li{display:grid;grid-template-columns:4.5rem 1fr 8.5rem;gap:.2rem 1rem;
padding:.45rem .3rem;border-top:1px solid var(--line)}
.adt .passes :target{background:var(--panel);outline:2px solid var(--verify)}
.adt .n,.adt .ms{color:var(--faint);font-size:.85rem;font-variant-numeric:tabular-nums}
.adt .ms{text-align:right}
.adt .tree,.adt .tree ol{overflow-wrap:anywhere}
.adt .tree ol{border-left:2px solid var(--line);padding-left:.7rem;margin:.15rem 0}
.adt .chip{display:inline-block;border:1px solid var(--line);border-radius:4px;padding:0 .35em;
margin:1px 1px;font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace;white-space:pre-wrap}
.adt .chip.off{color:var(--bad);text-decoration:line-through;background:none;opacity:.85}
.adt .chip.own{border-bottom:2px solid var(--verify)}
.adt{--early:#bfe3c8;--late:#c3dafa}
@media(prefers-color-scheme:dark){.adt{--early:#1f5a34;--late:#3c3f8f}}
.adt .ramp{background:linear-gradient(90deg,var(--early),var(--late))}
.adt .canvas{margin-top:.3rem;font:14px/1.9 ui-monospace,SFMono-Regular,Menlo,monospace}
.adt .cell{border-radius:3px;
background:color-mix(in oklab,var(--late) calc(100%*var(--n)/var(--passes)),var(--early));
animation:adt-fill 1ms calc(var(--n)*var(--pause)) step-end backwards}
.adt .replay:checked~.canvas .cell{animation-name:adt-fill-again}
@keyframes adt-fill{from{color:transparent;background:var(--line)}}
@keyframes adt-fill-again{from{color:transparent;background:var(--line)}}
@media(prefers-reduced-motion:reduce){.adt .cell{animation:none}}
.adt .steps{overflow-wrap:anywhere;white-space:pre-wrap;
font:13px/1.7 ui-monospace,SFMono-Regular,Menlo,monospace}
.adt .mask{color:var(--faint);letter-spacing:.15em}
.adt .chip.new{background:var(--early);border-color:transparent}
.adt .chip.again{outline:2px solid var(--draft)}
@media(max-width:40rem){.adt .passes>li .steps{grid-column:1/-1;grid-row:2}
.adt .passes>li{grid-template-columns:1fr auto}
.adt .passes>li .tree{grid-column:1/-1;grid-row:2}}
"""
