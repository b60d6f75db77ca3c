"""Accuracy and passes of each method on the shipped diffusion model, relative to one token per
pass."""

from __future__ import annotations

from anydecode.certification.checks import measure
from anydecode.certification.denoising import TASKS, accuracy_lost, passes_ratio

#: Tasks with one right answer, for which unmasking several tokens at once does no harm.
DETERMINED = ("copy", "reverse", "sort")


def _register(
    key: str, decoder: str, loss: float, share: float, tasks: tuple[str, ...] = TASKS
) -> None:
    """Registers the accuracy that a method may lose and the share of passes that it may need."""

    def lost(samples: int) -> float:
        return accuracy_lost(decoder, samples, tasks)

    def passes(samples: int) -> float:
        return passes_ratio(decoder, samples, tasks)

    samples = 16 * len(tasks)
    where = "tasks with one right answer" if tasks == DETERMINED else "all tasks"
    name = f"accuracy lost against one token per pass, {where}"
    measure(key, name, samples=samples, margin=loss)(lost)
    measure(key, "passes relative to one token per pass", samples=samples, margin=share)(passes)


#: By key: the decoder, the accuracy it may lose, and the share of the passes it may need.
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
#: The same for methods that are known to lose accuracy where tokens depend on each other.
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


@measure("eoser-ass", "passes relative to one token per pass", samples=64, margin=0.25)
def eoser_passes(samples: int) -> float:
    """floor(log2 24) = 4 passes instead of up to 24."""
    return passes_ratio("eoser-ass", samples)


@measure("eoser-ass", "accuracy lost, tasks with one right answer", samples=63, margin=0.1)
def eoser_loss(samples: int) -> float:
    """The last pass fills half the canvas at once, which works only for tasks with one right
    answer."""
    return accuracy_lost("eoser-ass", samples, DETERMINED)
