"""What the shipped diffusion model loses and saves with each method, against one token per pass."""

from __future__ import annotations

from anydecode.evaluation.certify import measure
from anydecode.evaluation.denoising import TASKS, accuracy_lost, share_of_passes

#: The tasks with one right answer, which parallel commits do not spoil.
DETERMINED = ("copy", "reverse", "sort")


def _register(
    key: str, decoder: str, loss: float, share: float, tasks: tuple[str, ...] = TASKS
) -> None:
    """What the shipped model loses and saves with this method: margins fixed beforehand."""

    def lost(samples: int) -> float:
        return accuracy_lost(decoder, samples, tasks)

    def passes(samples: int) -> float:
        return share_of_passes(decoder, samples, tasks)

    samples = 16 * len(tasks)
    where = "determined tasks" if tasks == DETERMINED else "all tasks"
    name = f"accuracy lost against one token per pass, {where}"
    measure(key, name, samples=samples, margin=loss)(lost)
    measure(key, "passes against one token per pass", samples=samples, margin=share)(passes)


#: By key: how it is asked, the accuracy it may lose, and the share of the passes it may need.
MEASURES: dict[str, tuple[str, float, float]] = {
    "localleap": ("localleap", 0.05, 0.5),
    "creditdecoding": ("creditdecoding", 0.05, 0.5),
    "adablock": ("adablock", 0.05, 0.5),
    "cd4lm": ("cd4lm", 0.05, 0.5),
    "dimple": ("dimple", 0.05, 0.5),
    "eb-sampler": ("eb-sampler", 0.05, 0.5),
    "bacd-tccf": ("bacd-tccf:low=0.9,high=0.95", 0.05, 0.5),
    "learn2pd": ("learn2pd", 0.05, 0.5),
    "ete": ("ete", 0.05, 0.5),
    "apd": ("apd:window=24,weight=0.5", 0.1, 0.5),
    "freedave": ("freedave:block=24", 0.0, 0.7),
    "ssd": ("ssd:drafts=8", 0.0, 0.7),
}
#: The same where tokens that depend on each other are known to suffer.
ON_DETERMINED: dict[str, tuple[str, float, float]] = {
    "prophet": ("prophet:early=16,middle=14,late=12", 0.08, 0.95),
    "ccd": ("ccd:rule=averaged", 0.08, 0.7),
    "lrd": ("lrd:mixture=0.02", 0.12, 0.5),
    "window-diffusion": ("window-diffusion:window=24,active=8,threshold=0.9", 0.08, 0.5),
    "dream-coder": ("dream-coder:steps=16", 0.08, 0.7),
    "dparallel": ("dparallel", 0.08, 0.5),
}

for _key, _measured in MEASURES.items():
    _register(_key, *_measured)
for _key, _measured in ON_DETERMINED.items():
    _register(_key, *_measured, DETERMINED)


@measure("eoser-ass", "passes against one token per pass", samples=64, margin=0.25)
def eoser_passes(samples: int) -> float:
    """floor(log2 24) = 4 passes instead of up to 24."""
    return share_of_passes("eoser-ass", samples)


@measure("eoser-ass", "accuracy lost on the determined tasks", samples=63, margin=0.1)
def eoser_loss(samples: int) -> float:
    """The last pass fills half the canvas at once, which only determined tasks survive."""
    return accuracy_lost("eoser-ass", samples, DETERMINED)
