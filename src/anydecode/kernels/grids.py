"""GGUF's formats IQ1, IQ2 and IQ3, whose codes select points of a grid.

The grids are part of the formats, as published in `ggml-common.h` of llama.cpp (MIT licence). A
point has eight numbers of two bits or four of four bits, which are indices into the magnitudes of
the format. As 16-bit words, the points of a grid ascend, so the differences are stored.
"""

from __future__ import annotations

import functools
import zlib
from base64 import b85decode
from collections.abc import Callable

import numpy as np

from anydecode.kernels.bit_fields import fields, flat, half, words

#: Grid -> the values of the numbers of its points. Those of IQ1 are multiplied by 8.
_VALUES = {
    "IQ1_S": (-8, 0, 8),
    "IQ2_XXS": (8, 25, 43),
    "IQ2_XS": (8, 25, 43),
    "IQ2_S": (8, 25, 43),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
}
#: Formats whose points are those of another.
_SAME = {"IQ1_M": "IQ1_S"}


@functools.cache
def grid(format: str) -> np.ndarray:
    """The points of a format's grid, int8 `[points, 8 or 4]`; read-only."""
    name = _SAME.get(format, format)
    differences = np.frombuffer(zlib.decompress(b85decode(_DIFFERENCES[name])), "<u2")
    words = np.cumsum(differences, dtype=np.uint16)
    bits = 2 if len(_VALUES[name]) == 3 else 4
    indices = words[:, None] >> np.arange(0, 16, bits, dtype=np.uint16) & (2**bits - 1)
    points = np.array(_VALUES[name], np.int8)[indices]
    points.flags.writeable = False
    return points


#: The formats whose codes select points.
GRID_FORMATS = (*_VALUES, *_SAME)


def grid_codes(format: str, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of blocks of a format with a grid, before they are scaled, and the scales.

    Args:
        format: The format.
        blocks: uint8 `[blocks, bytes]`.

    Returns:
        Whole numbers int8 `[blocks, 256]`, and float32 `[blocks, 8 or 16]`, the scales of as many
        equal parts.
    """
    indices, flips, scales, scale = _PARTS[format](blocks)
    values = grid(format)[indices]
    if format in ("IQ1_S", "IQ1_M"):
        # Points are moved by one eighth; `flips` are the directions by eight values.
        values = values + np.where(flips == 0, np.int8(1), np.int8(-1))[..., None]
    else:
        negative = np.unpackbits(flips, axis=-1, bitorder="little").astype(bool)
        values = np.where(negative, -flat(values), flat(values))
    return flat(values), scale * (2 * scales.astype(np.float32) + 1)


#: The indices of points, the signs or directions, the whole scales and the float32 scale of blocks.
_Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _signs(seven: np.ndarray) -> np.ndarray:
    """Seven signs of a byte and the eighth, by which the number of negative ones is even."""
    parity = seven ^ seven >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return (seven | (parity & 1) << 7).astype(np.uint8)


def _iq1_s(blocks: np.ndarray) -> _Parts:
    high = words(blocks, 34, 50, 2)
    indices = blocks[:, 2:34] | fields(high, (0, 3, 6, 9), 3) << 8
    down = np.repeat(high >> 15, 4, axis=-1)
    return indices, down, fields(high, (12,), 3), half(blocks, 0) * np.float32(0.125)


def _iq1_m(blocks: np.ndarray) -> _Parts:
    # The float16 is stored in the upper quarters of four words, which also have twelve bits of
    # scales each.
    stored, high = words(blocks, 48, 56, 2), fields(blocks[:, 32:48], (0, 4), 4)
    indices = blocks[:, :32] | (high & 7).astype(np.uint16) << 8
    quarters = stored >> 12 << np.array([0, 4, 8, 12], np.uint16)
    scale = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view(np.float16)
    scales = fields(stored, (0, 3, 6, 9), 3)
    return indices, high >> 3, scales, scale.astype(np.float32) * np.float32(0.125)


def _iq2_xxs(blocks: np.ndarray) -> _Parts:
    pairs = blocks[:, 2:].reshape(len(blocks), 8, 2, 4)
    packed = words(flat(pairs[:, :, 1]), 0, 32, 4)
    signs = _signs(fields(packed, (0, 7, 14, 21), 7))
    return flat(pairs[:, :, 0]), signs, packed >> 28, half(blocks, 0) * np.float32(0.125)


def _iq2_xs(blocks: np.ndarray) -> _Parts:
    packed = words(blocks, 2, 66, 2)
    scales = fields(blocks[:, 66:], (0, 4), 4)
    return packed & 511, _signs(packed >> 9), scales, half(blocks, 0) * np.float32(0.125)


def _iq2_s(blocks: np.ndarray) -> _Parts:
    high = fields(blocks[:, 66:74], (0, 2, 4, 6), 2).astype(np.uint16)
    indices, scales = blocks[:, 2:34] | high << 8, fields(blocks[:, 74:], (0, 4), 4)
    return indices, blocks[:, 34:66], scales, half(blocks, 0) * np.float32(0.125)


def _iq3_xxs(blocks: np.ndarray) -> _Parts:
    packed = words(blocks, 66, 98, 4)
    signs = _signs(fields(packed, (0, 7, 14, 21), 7))
    return blocks[:, 2:66], signs, packed >> 28, half(blocks, 0) * np.float32(0.25)


def _iq3_s(blocks: np.ndarray) -> _Parts:
    high = fields(blocks[:, 66:74], range(8), 1).astype(np.uint16)
    indices, scales = blocks[:, 2:66] | high << 8, fields(blocks[:, 106:], (0, 4), 4)
    return indices, blocks[:, 74:106], scales, half(blocks, 0)


_PARTS: dict[str, Callable[[np.ndarray], _Parts]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}

#: See the top of this file; zlib and base 85.
_DIFFERENCES = {
    "IQ1_S": (
        "c-oCujc(&M3>IZ6c4}XLuysxoU(*5|+U*W|o!*)NJz$6K)~(nx?9InN(UP6)h9ZqEQ55-"
        "+{Kz=xU4?(%)h@UezZdw~xQ^G(@JUu$+k0}LyA?jQZg3HwmiURNgVw!!Z|8Tj^Q61Mx9ECZp_>E#m$%<RP7Wy5q0"
        "|Z9@{ynSd?VnVNc6ZH@eJsC#X7{B-kqaP@hk2AiP8`F-KkWAt7QAY)<(Sfkgf3`3Oha1qK*M20B@6(2gRm4>U)E-"
        "8?$uWeTk6itoUw0mb5>pbYL8O=B;2qC>DUL361Es?vyoE?#&{)&@=RYf}gELYY%i|tB5vueuMV`$8^L|&JG;!VCd"
        "Is=dYFt^O(q5o7o7NWY6~i%jQu9MyJZ+pDc=Qot>%GR<gXZ^8>EZ`x#1qg~*we@Qc}9-"
        "ZJ3=GsUYH0dv`#*P}g=v2FOB_DIub_YTqa?s^iPlw%RKy~I2x1eY=^rn@QAI<_QgtP*Nllw5Fx_k82DiX-"
        "n0v%MXhX_jt_sCr(J8_A+C_)OOIMJ|f$t;OGK<x`AWe(SV;TaLztGwsB^9IP-xJbC_uem`@}$lF`Jx3d_D$E0~TI"
        "W>BGpkgnjmha3{vH2JFG%~Nr4dP|WuuAi#&f?!%K1&6OHQ;`;N*d6oirFi=8{ECX+WH>RI-"
        "h83HG{k&T${GWeR43XrO3QFzNai7vz}J24&<!Z{K#C}W>FI!PJ9SjIfBs@$_fLEU(e9-"
        "N{hKzD>}=fcD&|d;5=Dqeu&JPt*;A)@|saYhI`WZhOzM$c|!67;TUrsisnNs{G~J3`ki=wUoe$eK|V;VOH`AMzBo"
        "aMh|WA7k6M*t%k?B?WYdk-Gof+fJ_DEziCZZ6Q5YtVEEK5qcp}e7i96YmBMV1aw)Af9?ey+mV>I0v^X*aB{Dgg{x"
        ">v@~Q1mKabdW2}16d1PpJ`<WBl3jp5-UBgC-"
        "F$^kQ_}ce5jr}&bx0%eZ^JNWOsDPPyzWqaxVa735lghEUm7WW<S~aC63J7S@tFVT)9i?!x<BGj7g<^EU4YIw#K^~"
        "n-"
        "jkB|9j2^>5z^4QRkPx02Eunt<R>uX_wuqoHr~IPwcZUTVX9uIjG7q;=RT{*eoFkJaKPm`7Y3^&7<cTPr|_~e|n8+"
        "!0&*bNYpMgk`41tjeU2gNF)~OHD`Us3R15tzNOU~42+z2KdHv3Yy;f;Px;=?JzY*aO>6z4J31eF%du!&=b4MWMzl"
        "RTE8c7Wo9liBnKIvTZAffB&~$@nEcI0Kf7$~^uFGeXQ=W}STV=ut%8!Bj>Jl;8&-"
        "!<7b1!v<{s0cC^W<}vw>rG#NFJM&N&e@#&e(CpfbEUeAt>uNMHedPyxKA&+KihRddpF+vVOKVzqS*sDxUbg`_6rW"
        ")R|~~jZY;HiGI<YI&#DPVmjkC%rNjjyU<D_n=|~vYWh(tfvR|sF;nX8<ky;KN#ITbP8ewq7n%c6ry9y2s)QSxtDX"
        "xi#@Ts&fKk%4*xPR|sjp|8g3b+9;qg1`h_CTjCJ?*L^GkSHto^7+COd9fj^6)Z=>>O;Z%vASL#MyL!t9sD;QpE9L"
        "OBt1#e60`;LV~D*y~_yNa){j{v`H9hJ=!7?*GI0Go8{0eoE|hkGrq#kd}EZ{R?w{Q3U"
    ),
    "IQ2_XXS": (
        "c-"
        "l>o%_~G<6vlt=9q$<5%`|34k?SKV7I(u;lA4l4*+^L^!%A!<ikg~|KVnKTNhv9mg%S%=w)R%GQp&<c@!UIC>2}Y#"
        "=bYy}=Q-zsLqv~5t!$%wRBt-"
        "?j!`Gyt~f@9#UN)HV4Nf?%DNON89y5jaZ%yA0$h@XFz%yAd~vol!Belxg0Uf{Eu1+_kx}kR@NTPoox=47^VWjt9`"
        "#~67W<9yW2<VGGE*Fo;w@0&k*B1}K9`(ZU-bwbVsbc<y_Ww8aVbuP?P1Vtn+%&=nA_I>8^>tYyy_<FQj%A{mBtow"
        "sw5}}8Vb_Cqv!?WRCz5o%!{Lo2c}uKK3`0G7i5c!vCO+PIJ(6bvz(c@^3&>n;@kTD{n}_wy^~aQqXr>2xO48({w`"
        "Um*wxMYdFI3X{R@{06U?xsy33JqOq2Pv{%zY?Qg)R`U96jKnv54Y<TX0O5PO=RadI_R`~ssbK5z"
    ),
    "IQ2_XS": (
        "c-noE!An$O6vcnv8=k#nm>L<!j4_`kgAv8U!9{H(6H+7>fsG^TI4-"
        "n^Bnq5}S>(QT5JHG8T86tI2v@CI)SuwmUCVIc`M!BmGsBDw@6EmU-Fxo2=U(tg=;v|4y%YMcM+V#ci+XZRwy!Uhw"
        "wyXjb5@eTAtiay5*=}GpPTejHRpHolrz#5Bh4_o&dPFC-"
        ">0dWW;V7<E@m=LD6FFMBJL?tRU}|r(TaaQi==V}y0VDKDEcgB8wqvav}akxGQ!-AD~{w%^3_<+<F>pB-YBcW2}>0"
        "H)+ri&LZ`a50*2UQlr_y&awvmhc%-?~Jm87EcPyJg2wC+hNSz<be9aX$=ux!V-"
        "+khC?K;owi$R$>{{h?EwBE;mZJs;JPQT2i6uK+#&@@mkk>aCR7u*bcocf(ED2kP{SL5-W86g!-;|4-"
        "?3&keTgaIF<z#Yma!!4oDsWPvc`=;hM7^N8Fx^7|2<e6pLWclm3lv(wj@{MB_EUW%b7Z3@{;uZhxJFT9d)qh?7HQ"
        "A+js|j%pxuH9o(cWJ1i1)_sZPL}}wY!{IQ+|p*N-"
        "?*rZlR{VPV+~KRE^J+Q{gvTs`<iYZ;?;@WS)KL)Z_Ns%MORic_@8tY?R0D1{e8d3cS>GHfohw;jQcgJzLWC49CYy"
        "3j"
    ),
    "IQ2_S": (
        "c-"
        "oy+&ubGw6#k}V8Z!(H9=dj8Nc>SnDurM{s)z><Lhx3Qv{G30AQf%NMGB>t2>u7sTh9e=dh;OUPxH&nY%;UEv&OQ_"
        "%+A|4-"
        "@Ny|9}6sDna>g$W?trMC23*bbo(3LUPJO3R%mt#ryA6=nA+?$$3cLkh&<PQXpj|Fk%@Xcik5eR8=KxezNU<L*a>W"
        "USFk9T-!}6|lzo(*7e1;)3yEP$&*Z%Tv4s(?^L-"
        "U7)VPlU4rP_+?Gm$oyi~2%@yPmqA8|<Ijdr$A*R80}|HouZ!*N<-xsOc@MHtgw>Eu}jR*ENhZx9mvkg-_Vc(iDZ;"
        "^W6iyL)tCpTfF{P@B6Qu3hYlV#Y1zSwf7l^D)Jx@OgfUTh5Yi_`(}sV1t+^YaxqyY}+-"
        "ppi3FijMPhA?DDMDCLaRk#Z~ick*rWIMxzQw`?!Y#VRJQhej|D|!6)}Nk#!YSUnf_~>6BiL#iFOHtRK%ZXd=qr75"
        "hh?Srgv&8F#TSZGQ;6(!Y61$&=;l6??IaSkfnQmz8>q?>G`u$!l!mkdk$gAzPax+s@J{bwcfRo@z$69Ct%gyN#LT"
        "XNk$)!aORR%px)gDsUGW*JsSJKX}Zu4_J|z^zGBpXwOj;F5OKZ@J7_<;U2$acu5{FL>}Fb^mah`b1{<nAMu*2iCw"
        ";()4mI?wkPeG*><EU;s7^U^(l75Z_&jme&G?mQX}D5!CTzHUl`O*2m"
    ),
    "IQ3_XXS": (
        "c-lpfKTE?<6va<M2?;TV5`s`_48=`C5O)#R;^6K_(vm?Z2NfNQbaK&Bvpa}%7xi-"
        "p{_g7^3Gdza&O7Jab0hhD39F-sJylox)bk~pg2%3A>Z@6@Q-"
        "_$Qr$7blz^OA0b+26*#`Yb)r&2$vHHPi0f_)pVycgAUktPl?>~q~a)v-pL3R30xT;nm+JNp3NOKp3FUc-MU%i7h<"
        "dB#hJ12<XYZi|#Tdrlsk?TpppKOuDw?uBP*YQ2Q387sKSIz>i(cHMGbO5Kp;S6ieR;oiq#22zo+(nFY`@j*Kz9m9"
        "%H1iI59tP{MfbEPXUcJAL{P3HziNu7ZlaXZx%rp?`e?s#*@ES+Ks;|ZrXG@D+_>5I<xZhs&mNvSz=eUK~BBblvV3"
        "u^yppbhU2zeqQ5"
    ),
    "IQ3_S": (
        "c-l>q&2G~`6ooGnC$-yntT-;Hp^h821<^|E5E48d1=<L@L!e5)uKbiOEV?fef_Gqv`U-"
        "sacv7m7Gk5OKIp^M)nB8CvELb5cu-"
        "4f#i&kO}bPlpBP6K<I^2W;Az>|@Y5pDS`?NENl^Xv`fINA!S#aeQ9zhgQ_1TEO6aGu#zi0+O0?d&DdZ9d13LhrC%"
        "31MyvPDfI{%5f#9`G1{3t4KX~O`vunt<Jx$s!D8?;v+k-I?W|ZN@{9qn7pq-xg$kO6hzeYQ)<Q1&*bAZ%+7w|87T"
        "hkYN8GLyn2~mR~e+wdnwY4`tzoE12YOz)X#sMIKD{POxSDi*TiRdo~y?({jOM}-L%)J-"
        "@;!hw$JYo(TO;ws9cgcr2YZX_k4akQ!>8h)s@2DD$@*W??av{O=3qH4iu?%KWCavnR=UOkIdU&#1NKB)5z?Nu$`}"
        "Fwf4?-"
        "?L19)Y8QEbCz)PY#oFPG4E4S$A@$KysdL<#{T8{=j>TT4Te@Js17g7hj<IL<1dR*3%QS~}n@F^?JSLSrUxWQ3bza"
        "fKW8Tq33?uY?rmldi<?NY<)NB)N><8a2RhQ~yZkPG$&EB&UI#{zu_6apnefumM_Rjv0+u2)i_R;mh9@;Nz{^qV`3"
        "#*}TXF5U6l+0k?b*CfEW<fuDoabQo|LQ&a4coch=SBVlcc4Ex"
    ),
}
