"""Which layers of a model are on which stage of a pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from trainer.checks import choice_error


@dataclass(frozen=True)
class StagePlan:
    """The layers of each stage.

    Attributes:
        layers: The names of the layers, in the order in which they run.
        starts: The index of the first layer of each stage.
        runners: The names of the modules that contain the layers, and may be called to run them.
        homes: The stage of each module, by name. Modules that all stages have count as the last
            one's, which runs all of the user's step.
        everywhere: The names of modules whose own parameters all stages have: those outside the
            model that runs the layers, and those that contain the layers.
    """

    layers: Sequence[str]
    starts: Sequence[int]
    runners: Sequence[str]
    homes: Mapping[str, int]
    everywhere: frozenset[str]

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.starts)

    def range_of(self, stage: int) -> range:
        """Return the indices of the layers of a stage."""
        return range(self.starts[stage], [*self.starts[1:], len(self.layers)][stage])

    def stages_with(self, name: str) -> set[int]:
        """Return the stages that have the own parameters of a module."""
        return set(range(self.stages)) if name in self.everywhere else {self.homes[name]}


def plan_stages(module: nn.Module, split: Sequence[str] | None, stages: int) -> StagePlan:
    """Divide the layers of a module into stages.

    Args:
        module: The user's module.
        split: The names of the layers with which the second and later stages begin; None takes the
            module's ``pp_plan``, else stages get about as many parameters.
        stages: The number of stages.

    Raises:
        ValueError: A name is unknown, or is no layer beside the others; or there are fewer layers
            than stages.
    """
    plan: Sequence[str] | None = getattr(module, "pp_plan", None) if split is None else split
    parts = dict(module.named_modules())
    if plan is None:
        container = _longest_container(module, stages)
        layers = _children(container, parts[container])
        starts = _balanced([_size(parts[name]) for name in layers], stages)
    else:
        container, layers, starts = _named(module, plan, stages)
    # The model that runs the layers: what is inside it and not a layer runs before or after them.
    model = container.partition(".")[0]
    if model == container and isinstance(parts[container], (nn.ModuleList, nn.ModuleDict)):
        model = ""  # the user's module runs them itself
    runners = [name for name in parts if _is_inside(container, name)]
    homes, everywhere, seen = dict[str, int](), set[str](), False
    of_layer = dict(_stage_of_layers(layers, starts))
    for name in parts:
        seen = seen or name == container
        layer = next((layer for layer in of_layer if _is_inside(name, layer)), None)
        if layer is not None:
            homes[name] = of_layer[layer]
        elif not _is_inside(name, model) or name in runners:
            homes[name] = stages - 1
            everywhere.add(name)
        else:
            homes[name] = stages - 1 if seen else 0
    return StagePlan(layers, starts, runners, homes, frozenset(everywhere))


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name == outer or name.startswith(outer + ".")


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _children(name: str, module: nn.Module) -> list[str]:
    return [f"{name}.{child}".removeprefix(".") for child, _ in module.named_children()]


def _stage_of_layers(layers: Sequence[str], starts: Sequence[int]) -> Iterator[tuple[str, int]]:
    for stage, (first, end) in enumerate(pairwise([*starts, len(layers)])):
        yield from ((layer, stage) for layer in layers[first:end])


def _longest_container(module: nn.Module, stages: int) -> str:
    """Return the name of the container of the blocks, or of any layers if none are alike.

    Raises:
        ValueError: There is no container with so many layers.
    """
    kinds = {kind for part in module.modules() for kind in _blocks_of(part)}

    def rank(part: nn.Module) -> tuple[bool, bool, int]:
        classes = Counter(type(child).__name__ for child in part.children())
        return bool(classes.keys() & kinds), len(classes) == 1, _size(part)

    containers: list[tuple[tuple[bool, bool, int], str]] = [
        (rank(part), name)
        for name, part in module.named_modules()
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) >= stages and _size(part)
    ]
    if not containers:
        raise ValueError(
            f"{type(module).__name__} has no nn.ModuleList or nn.Sequential of at least {stages} "
            "layers to divide into stages: name the layers with which the second and later stages "
            "begin in ParallelismConfig(pp_split=[...]), or in a pp_plan of the module."
        )
    _, name = max(containers)
    return name


def _blocks_of(part: nn.Module) -> Sequence[str]:
    return getattr(part, "_no_split_modules", None) or ()  # of transformers


def _balanced(sizes: Sequence[int], stages: int) -> list[int]:
    """Return where stages with about as many parameters begin, each with a layer at least."""
    sums = list(accumulate(sizes, initial=0))
    starts = [0]
    for stage in range(1, stages):
        wanted = sums[-1] * stage / stages
        places = range(starts[-1] + 1, len(sizes) - (stages - stage) + 1)
        starts.append(min(places, key=lambda place: abs(sums[place] - wanted)))
    return starts


def _named(
    module: nn.Module, names: Sequence[str], stages: int
) -> tuple[str, list[str], list[int]]:
    """Return the container of named layers, all its layers, and the indices of stages' first."""
    parts = dict(module.named_modules())
    for name in names:
        if name not in parts:
            what = f"A layer of {type(module).__name__} that begins a stage"
            raise ValueError(choice_error(what, name, [n for n in parts if n]))
    containers = {name.rpartition(".")[0] for name in names}
    if len(names) != stages - 1 or len(containers) != 1:
        raise ValueError(
            f"The {stages} stages of {type(module).__name__} cannot begin with "
            f"{', '.join(names) or 'no layer'}: name {stages - 1} layers, children of one module "
            "that runs them in their order."
        )
    container = containers.pop()
    layers = _children(container, parts[container])
    starts = [0, *(layers.index(name) for name in names)]
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ValueError(
            f"The stages begin with {', '.join(names)}, which is not the order of the layers of "
            f"{container or type(module).__name__} after its first: {', '.join(layers)}."
        )
    return container, layers, starts
