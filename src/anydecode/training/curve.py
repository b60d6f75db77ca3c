"""Training curves: loss and accuracy of a training run, training and held-out loss of an adapter
run, the acceptance of a drafter's drafts, the agreement of early exits, their routers' loss, or a
study of draft models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from anydecode.plots import COLOURS, INK, figure, logarithmic
from anydecode.training.scaling_law import LogLinearLaw


def draw_training(log: dict[str, Any], file: Path) -> None:
    """Draw a training run: loss above, accuracy on held-out questions below, one colour per stage.
    `log` is the content of `log.json`."""
    title = "accuracy on held-out questions, mean of tasks"
    _draw_stages(log, file, "Training", title, lambda e: e.get("accuracy", {}).get("all"))


def draw_draft_model(log: dict[str, Any], file: Path) -> None:
    """Draw a run of a draft model: loss above, and below the probability that its tokens are
    accepted at those of held-out answers. `log` is the content of `log.json`."""
    title = "probability of acceptance by rejection sampling, held-out answers"
    _draw_stages(log, file, "Training of a draft model", title, lambda e: e.get("acceptance"))


def _draw_stages(
    log: dict[str, Any],
    file: Path,
    title: str,
    share: str,
    share_of: Callable[[dict[str, Any]], float | None],
) -> None:
    """Loss above, and below a share that some entries have, titled `share`."""
    history: list[dict[str, Any]] = log["history"]
    with figure(file, title, rows=2, share_x=True) as (loss, shares):
        for colour, stage in zip(COLOURS, dict.fromkeys(e["stage"] for e in history), strict=False):
            entries = [entry for entry in history if entry["stage"] == stage]
            losses = [(_minutes(e), max(e["loss"], 1e-4)) for e in entries if "loss" in e]
            found = [(_minutes(e), share_of(e)) for e in entries]
            loss.plot(*_transposed(losses), color=colour, label=stage)
            checks = [(x, y) for x, y in found if y is not None]
            shares.plot(*_transposed(checks), color=colour, marker=".")
        loss.set_title("loss per token (logarithmic)")
        logarithmic(loss, "y")
        shares.set_title(share)
        shares.set_ylim(0, 1)
        shares.set_xlabel("minutes")


def draw_scaling(results: dict[str, Any], file: Path) -> None:
    """Draw a study of draft models and its laws (dotted): accepted length by learned tokens above,
    one colour per number of layers, and throughput by batch below. `results` is the content of
    `results.json` with `laws`."""
    laws = {name: LogLinearLaw(**law) for name, law in results["laws"].items()}
    points, speeds = results["points"], results["speeds"]
    with figure(file, "Scaling of draft models", rows=2) as (length, throughput):
        for colour, layers in zip(
            COLOURS, dict.fromkeys(p["layers"] for p in points), strict=False
        ):
            own = sorted((p for p in points if p["layers"] == layers), key=lambda p: p["tokens"])
            tokens = [p["tokens"] for p in own]
            length.plot(tokens, [p["accepted"] for p in own], "o", color=colour)
            length.plot(tokens, [laws["accepted"].predict(p) for p in own], ":", color=colour)
            rows = [speed for speed in speeds if speed["layers"] == layers]
            _draw_speeds(throughput, rows, laws, colour, f"{layers} layers")
        plain = [speed for speed in speeds if speed["layers"] == 0]
        _draw_speeds(throughput, plain, laws, INK, "without drafts")
        length.set_title("tokens per pass, by tokens learned")
        throughput.set_title("tokens per second, by batch")
        for panel in (length, throughput):
            logarithmic(panel, "x")


def _draw_speeds(
    panel: Any,
    speeds: list[dict[str, Any]],
    laws: dict[str, LogLinearLaw],
    colour: str,
    label: str,
) -> None:
    batches = [speed["batch"] for speed in speeds]
    panel.plot(batches, [speed["tokens_per_second"] for speed in speeds], "o", color=colour)
    law = laws[f"tokens_per_second, {speeds[0]['layers']} layers"]
    panel.plot(batches, [law.predict(s) for s in speeds], ":", color=colour, label=label)


def draw_held_out(
    log: dict[str, Any],
    file: Path,
    title: str = "Training of an adapter",
    unit: str = "nats per masked token",
) -> None:
    """Draw a training run: training loss, and held-out loss by kind of text or by what runs. `log`
    is the content of `log.json`."""
    history: list[dict[str, Any]] = log["history"]
    series = {"training": [(_minutes(e), e["loss"]) for e in history if "loss" in e]}
    for entry in history:
        for name, loss in entry.get("held_out", {}).items():
            series.setdefault(f"held-out {name}", []).append((_minutes(entry), loss))
    with figure(file, title, height=2.6) as (panel,):
        for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
            panel.plot(*_transposed(points), color=colour, label=name)
        panel.set_title(unit)
        panel.set_ylim(bottom=0)
        panel.set_xlabel("minutes")


def draw_acceptance(log: dict[str, Any], file: Path) -> None:
    """Draw a drafter's run: the probability that a draft is accepted, by draft step, on texts that
    are trained on and on held-out ones. `log` is the content of `log.json`."""
    history: list[dict[str, Any]] = log["history"]
    unrolled = len(next(entry["held_out"] for entry in history if "held_out" in entry))
    with figure(file, "Training of a drafter", height=2.6) as (panel,):
        for step, colour in zip(range(unrolled), COLOURS, strict=False):
            for name, style in (("acceptance", "-"), ("held_out", ":")):
                points = [(_minutes(e), e[name][step]) for e in history if name in e]
                label = f"step {step + 1}" if name == "acceptance" else None
                if points:
                    panel.plot(*_transposed(points), style, color=colour, label=label)
        panel.set_title("probability of acceptance (dotted: held-out texts)")
        panel.set_ylim(0, 1)
        panel.set_xlabel("minutes")


def draw_agreement(log: dict[str, Any], file: Path) -> None:
    """Draw a run that trains exits: the training loss above, and below how often each of some exits
    predicts the token of the last layer on held-out answers. `log` is the content of `log.json`;
    its agreements are those of its `exits`, or of all layers."""
    history: list[dict[str, Any]] = log["history"]
    entries = [entry for entry in history if "agreement" in entry]
    exits = log.get("exits") or range(1, len(entries[0]["agreement"]) + 1)
    shown = {exits[len(exits) * part // 6 - 1] for part in range(1, 6)} if len(exits) > 5 else exits
    with figure(file, "Training for early exits", rows=2, share_x=True) as (loss, agreement):
        points = [(_minutes(e), e["loss"]) for e in history if "loss" in e]
        loss.plot(*_transposed(points), color=INK)
        loss.set_title("training loss")
        for layers, colour in zip(sorted(shown), COLOURS, strict=False):
            index = exits.index(layers)
            points = [(_minutes(e), e["agreement"][index]) for e in entries]
            agreement.plot(*_transposed(points), color=colour, marker=".", label=f"{layers} layers")
        agreement.set_title("agreement with the last layer, held-out answers")
        agreement.set_ylim(0, 1)
        agreement.set_xlabel("minutes")


def draw_exits(log: dict[str, Any], file: Path) -> None:
    """Draw a run of exit routers or predictors: the loss on trained rows, and on held-out ones per
    exit. `log` is the content of `log.json`."""
    history: list[dict[str, Any]] = log["history"]
    with figure(file, "Training of early exits", height=2.6) as (panel,):
        losses = [(e["step"], e["loss"]) for e in history if "loss" in e]
        if losses:
            panel.plot(*_transposed(losses), color="black", label="training, mean of exits")
        entries = [entry for entry in history if "exits" in entry]
        exits = [one["exit"] for one in entries[0]["exits"]]
        shown = sorted({exits[len(exits) * part // 5] for part in range(5)})
        for exit, colour in zip(shown, COLOURS, strict=False):
            points = [(e["step"], e["exits"][exits.index(exit)]["loss"]) for e in entries]
            panel.plot(*_transposed(points), ":", color=colour, marker=".", label=f"{exit} layers")
        panel.set_title("nats per row (dotted: held-out texts)")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("steps")


def _minutes(entry: dict[str, Any]) -> float:
    return float(entry["seconds"]) / 60


def _transposed(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
