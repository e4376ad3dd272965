"""The command `trainer estimate-memory`: the memory that training needs, without allocating it."""

from __future__ import annotations

import argparse
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainer.checks import choice_error
from trainer.cli.parsing import (
    CommandError,
    aligned,
    command_parser,
    count,
    echo,
    import_from_here,
    import_named,
    sigint_default,
)
from trainer.strict_json import dumps

if TYPE_CHECKING:
    from torch import nn

    from trainer.cli.estimate_memory.footprint import Footprint, Input
    from trainer.cli.estimate_memory.sharding import Layout

_PRECISIONS = ("no", "fp16", "bf16", "fp8", "pure-bf16")
_DTYPES = ("float32", "float16", "bfloat16", "fp8", "int8", "int4")
_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)?(?::(\w+))?")
_OWN = "MODULE:NAME, a class or function that creates an optimizer from a list of parameters"
_PATIENCE = 10.0  # seconds in which a hub finds a configuration of a few kilobytes
_COLUMNS = ("parameters", "gradients", "optimizer", "buffers", "gathered", "activations")


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer estimate-memory`."""
    made = command_parser(
        prog,
        "Estimate how much memory training a model takes on each process. The model is created "
        "without data, so any size fits.\n\n"
        "fp16 and bf16 are those of Trainer(mixed_precision=...): weights, gradients and optimizer "
        "state keep their dtype; activations shrink, but include 16-bit copies of the weights. fp8 "
        "is like bf16 without these copies. pure-bf16 converts the model itself. Activations are "
        "what a forward pass keeps for backward, with CPU kernels. Not counted: temporary memory "
        "of operations, communication buckets, allocator fragmentation and the driver's memory."
        "\n\n"
        "--dtypes only gives the bytes of the weights and of the largest layer; int8 and int4 "
        "without quantisation scales.\n\n"
        "--fsdp and --tp shard the model as the Trainer does, and give the memory of the first "
        "process, which has the most. 'gathered' counts the parameters that are gathered at the "
        "same time: the model's own, and those of two wrapped submodules. Replicas (HSDP) change "
        "nothing. --shards divides the totals as the ZeRO stages do.",
        examples=[
            ("a class in net.py, in the current folder", "net:Net --init width=512"),
            ("with activations, for batches of 32", "net:Net --input 3x224x224 --batch 32"),
            ("token ids, by the name of the argument", "net:Net --input input_ids=1024:int64"),
            ("another optimizer", "net:Net --optimizer sgd --optimizer-init momentum=0.9"),
            ("sharded over processes, by the stages of ZeRO", "net:Net --shards 1 8 64"),
            ("sharded by FSDP, a unit for each Block", "net:Net --fsdp 8 64 --wrap Block"),
            ("layers split over 8 of 64 processes", "net:Net --fsdp 8 --tp 8 --wrap Block"),
            ("a model of transformers", "some/model-name --precision pure-bf16"),
            ("memory to load it, without training", "some/model-name --dtypes float16 int8 int4"),
        ],
        codes={0: "done", 1: "the model cannot be created or measured without data"},
    )
    several = partial(made.add_argument, nargs="+", action="extend")
    text = (
        "a torch.nn.Module, or a function that returns one; else the name or the folder of a model "
        "of transformers, or timm/NAME"
    )
    made.add_argument("model", metavar="MODULE:CLASS", help=text)
    text = "arguments of the class, values as in YAML"
    several("--init", type=_pair, default=[], metavar="NAME=VALUE", help=text)
    several("--precision", choices=_PRECISIONS, help="default: no bf16")
    text = f"of torch.optim, or {_OWN}; default: adamw"
    made.add_argument("--optimizer", metavar="NAME", help=text)
    text = "arguments of the optimizer, values as in YAML"
    several("--optimizer-init", type=_pair, default=[], metavar="NAME=VALUE", help=text)
    text = "what forward takes, the shape of one sample: 3x224x224 or input_ids=1024:int64"
    several("--input", type=_input, default=[], metavar="[NAME=]SHAPE[:DTYPE]", help=text)
    several("--batch", type=count, metavar="N", help="batch sizes; default: 1")
    several("--shards", type=count, metavar="N", help="numbers of ZeRO processes; default: 1")
    text = "numbers of FSDP processes per replica; default: 1"
    several("--fsdp", type=count, metavar="N", help=text)
    text = "numbers of tensor-parallel processes, by the model's tp_plan; default: 1"
    several("--tp", type=count, metavar="N", help=text)
    text = "classes of submodules to wrap as FSDP units; default: _no_split_modules"
    several("--wrap", metavar="CLASS", help=text)
    text = "recompute the activations of wrapped submodules in backward"
    made.add_argument("--activation-checkpointing", action="store_true", help=text)
    text = "only the weights, in these dtypes: " + ", ".join(_DTYPES)
    several("--dtypes", choices=_DTYPES, metavar="DTYPE", help=text)
    add = made.add_argument
    text = "library of the model: timm, or transformers (the default)"
    add("--library_name", "--library-name", choices=("timm", "transformers"), help=text)
    text = "run model code from the Hugging Face hub"
    add("--trust_remote_code", "--trust-remote-code", action="store_true", help=text)
    made.add_argument("--json", action="store_true", help="print JSON, in bytes")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0.

    Raises:
        CommandError: The model or the optimizer cannot be found, created or measured.
    """
    with sigint_default():
        from trainer.cli.estimate_memory import footprint

    import_from_here()
    prefix = "timm/" if arguments.library_name == "timm" else ""
    name = prefix + arguments.model.removeprefix(prefix)
    make = _maker(name, dict(arguments.init), trust=arguments.trust_remote_code)
    if arguments.dtypes:
        return _weights(arguments, make)
    optimizer, make_optimizer = _optimizer(
        arguments.optimizer or "adamw", dict(arguments.optimizer_init)
    )
    inputs = [_typed(*typed) for typed in arguments.input]
    layouts = _layouts(arguments)
    numbers = _attempt(arguments.model, partial(footprint.count, make))
    rows: list[dict[str, Any]] = []
    for precision in dict.fromkeys(arguments.precision or ("no", "bf16")):
        for batch in dict.fromkeys((inputs and arguments.batch) or (1,)):
            settings = {"precision": precision, "inputs": inputs, "batch": batch}
            settings |= {"make": make, "make_optimizer": make_optimizer}
            facts = {"precision": precision, "batch": batch if inputs else None}
            for where, part in _parts(arguments, layouts, settings):
                sizes = {name: getattr(part, name) for name in _COLUMNS}
                rows.append({**facts, **where, **sizes, "total": part.total})
    if arguments.json:
        names = ("parameters", "trained", "buffers")
        report = {"model": arguments.model, "elements": dict(zip(names, numbers, strict=True))}
        echo(dumps({**report, "optimizer": optimizer, "rows": rows}, indent=1))
        return 0
    total, trained, buffers = numbers
    echo(f"{arguments.model}: {total:,} parameters, {trained:,} trained; {buffers:,} in buffers")
    echo(f"optimizer: {optimizer}\n")
    echo(_table(rows))
    if not inputs:
        echo("\nActivations are unknown without --input SHAPE, of one sample.")
    return 0


def _weights(arguments: argparse.Namespace, make: Callable[[], nn.Module]) -> int:
    """Show the bytes of the weights alone, by dtype; return 0."""
    from trainer.cli.estimate_memory import footprint

    unused = ("precision", "input", "batch", "shards", "fsdp", "tp", "wrap")
    for option in (*unused, "optimizer", "optimizer-init", "activation-checkpointing"):
        if getattr(arguments, option.replace("-", "_")):
            raise CommandError(f"--dtypes estimates only weights; leave out --{option}.", code=2)
    rows = []
    for dtype in dict.fromkeys(arguments.dtypes):
        total, layer = _attempt(arguments.model, partial(footprint.weights_in, make, dtype))
        rows.append({"dtype": dtype, "largest layer": layer, "total": total})
    if arguments.json:
        echo(dumps({"model": arguments.model, "rows": rows}, indent=1))
        return 0
    lines = [[row["dtype"], _size(row["largest layer"]), _size(row["total"])] for row in rows]
    echo(aligned([["dtype", "largest layer", "total"], *lines], right=(1, 2)))
    return 0


def _layouts(arguments: argparse.Namespace) -> list[Layout]:
    """Return the layouts of --fsdp and --tp; none if neither is given."""
    if not (arguments.fsdp or arguments.tp):
        if arguments.wrap or arguments.activation_checkpointing:
            raise CommandError("--wrap and --activation-checkpointing need --fsdp or --tp.", code=2)
        return []
    if "fp8" in (arguments.precision or ()):
        raise CommandError(
            "--precision fp8 is not measured with --fsdp or --tp: leave one of them out.", code=2
        )
    from trainer.cli.estimate_memory.sharding import Layout

    sizes = product(dict.fromkeys(arguments.fsdp or (1,)), dict.fromkeys(arguments.tp or (1,)))
    return [
        Layout(
            shard=shard,
            tp=tp,
            wrap=arguments.wrap and tuple(arguments.wrap),
            activation_checkpointing=arguments.activation_checkpointing,
        )
        for shard, tp in sizes
    ]


def _parts(
    arguments: argparse.Namespace, layouts: Sequence[Layout], settings: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], Footprint]]:
    """Yield the memory of one process for each requested way of sharding, with its description."""
    from trainer.cli.estimate_memory import footprint, sharding

    if arguments.shards or not layouts:
        whole = _attempt(arguments.model, partial(footprint.measure, **settings))
        for processes in dict.fromkeys(arguments.shards or (1,)):
            for stage in (0,) if processes == 1 else (1, 2, 3):
                part = whole.sharded(stage, processes) if stage else whole
                text = f"ZeRO-{stage}" if stage else "-"
                yield {"processes": processes, "zero": stage, "sharding": text}, part
    for layout in layouts:
        one = layout.processes == 1
        measure = footprint.measure if one else partial(sharding.measure, layout=layout)
        part = _attempt(arguments.model, partial(measure, **settings))
        yield {"processes": layout.processes, "zero": 0, "sharding": str(layout)}, part


def _table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [["precision", "batch", "processes", "sharding", *_COLUMNS, "total"]]
    for row in rows:
        unknown = row["activations"] is None
        sizes = ["unknown" if row[name] is None else _size(row[name]) for name in _COLUMNS]
        begin = [str(row[name] or "-") for name in ("precision", "batch", "processes", "sharding")]
        lines.append([*begin, *sizes, _size(row["total"]) + " +" * unknown])
    return aligned(lines, right=[at for at in range(len(lines[0])) if at not in (0, 3)])


def _size(count: float) -> str:
    """Return bytes in units of 1024, as device memory is counted."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=VALUE")
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        raise argparse.ArgumentTypeError(f"{value!r}, of {name}, cannot be read as YAML") from None
    if isinstance(read, str):  # YAML reads 1e-3 as text, 1.0e-3 as a number
        with suppress(ValueError):
            read = float(read)
    return name, read


def _input(text: str) -> tuple[str | None, tuple[int, ...], str]:
    match = _INPUT.fullmatch(text)
    if not text or match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be a shape without the batch such as 3x224x224, with a type if it is "
            "not float32 (1024:int64), after a name if it has one (input_ids=1024:int64)"
        )
    shape = tuple(map(int, match[2].split("x"))) if match[2] else ()
    return match[1], shape, match[3] or "float32"


def _typed(name: str | None, shape: tuple[int, ...], dtype: str) -> Input:
    import torch

    from trainer.cli.estimate_memory.footprint import Input

    of_torch = getattr(torch, dtype, None)
    if not isinstance(of_torch, torch.dtype):
        dtypes = [
            attribute
            for attribute in vars(torch)
            if isinstance(getattr(torch, attribute), torch.dtype)
        ]
        raise CommandError(choice_error("The type of an input", dtype, dtypes), code=2)
    return Input(name=name, shape=shape, dtype=of_torch)


def _maker(model: str, init: dict[str, Any], *, trust: bool) -> Callable[[], nn.Module]:
    """Return a function that creates the module."""
    if ":" not in model:
        names, top = model.split("."), model.partition(".")[0]
        if all(map(str.isidentifier, names)) and not Path(model).exists() and find_spec(top):
            near = ":".join([".".join(names[:-1]) or top, names[-1] if names[1:] else "CLASS"])
            raise CommandError(f"{model!r} is not MODULE:CLASS. Did you mean {near!r}?", code=2)
        return partial(_of_library, model, init, trust=trust)
    made = import_named(model)
    if not callable(made):
        raise CommandError(f"{model} is {made!r}; it must be a class or a function.")
    try:
        inspect.signature(made).bind(**init)
    except TypeError as error:
        raise CommandError(
            f"{model}{inspect.signature(made)} cannot be called ({error}): pass its arguments as "
            "--init NAME=VALUE.",
            code=2,
        ) from None
    return partial(_complete, made, init)


def _complete(made: Callable[..., Any], init: dict[str, Any]) -> nn.Module:
    from torch import nn

    from trainer.module import TrainModule

    module = made(**init)
    if not isinstance(module, nn.Module):
        raise CommandError(f"{made!r} returns a {type(module).__name__}, not a torch.nn.Module")
    if isinstance(module, TrainModule):
        module.configure_model()
    return module


def _of_library(name: str, init: dict[str, Any], *, trust: bool) -> nn.Module:
    """Return a model of transformers or timm by its name, without its weights."""
    library = "timm" if name.startswith("timm/") else "transformers"
    try:
        if library == "timm":
            import timm

            module: nn.Module = timm.create_model(name.removeprefix("timm/"), **init)
            return module
        from transformers import AutoConfig, AutoModel
    except ImportError:
        raise CommandError(
            f"{name!r} is not MODULE:CLASS, so it names a model of {library}, which is not "
            f"installed: pip install {library}."
        ) from None
    code: dict[str, Any] = {"trust_remote_code": True} if trust else {}
    lookup: Future[Any] = Future()

    def look_up() -> None:
        try:
            lookup.set_result(AutoConfig.from_pretrained(name, **code, **init))
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            lookup.set_exception(error)

    # In a thread, since without a network the library retries for minutes.
    threading.Thread(target=look_up, daemon=True).start()
    try:
        config = lookup.result(_PATIENCE)
    except FutureTimeoutError:
        raise CommandError(
            f"{name!r} was not found on this machine, and the hub did not answer within "
            f"{_PATIENCE:g} seconds."
        ) from None
    except OSError as error:
        raise CommandError(f"transformers finds no model {name!r}: {error}") from None
    model: nn.Module = AutoModel.from_config(config, **code)
    return model


def _optimizer(name: str, init: dict[str, Any]) -> tuple[str, Callable[[Any], Any]]:
    """Return the name of an optimizer with its arguments, and a function that creates it."""
    import torch

    if ":" in name:
        cls = import_named(name)
        if not callable(cls):
            raise CommandError(f"{name} is {cls!r}; --optimizer takes {_OWN}.", code=2)
    else:
        classes = {
            attribute.lower(): value
            for attribute, value in vars(torch.optim).items()
            if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
        }
        # LBFGS and SparseAdam cannot step on dense gradients alone.
        choices = sorted(classes.keys() - {"lbfgs", "sparseadam", "optimizer"})
        if name.lower() not in choices:
            hint = f"Pass a custom optimizer as {_OWN}."
            raise CommandError(f"{choice_error('The optimizer', name, choices)} {hint}", code=2)
        cls = classes[name.lower()]
        name = f"torch.optim.{cls.__name__}"
    arguments = ", ".join(f"{key}={value!r}" for key, value in init.items())
    return f"{name}({arguments})" if arguments else name, partial(cls, **init)


def _attempt(model: str, work: Callable[[], Any]) -> Any:
    # Otherwise it prints the traceback of the error below.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    try:
        return work()
    except CommandError:
        raise
    except Exception as error:
        raise CommandError(
            f"{model} cannot be created or run without data: {type(error).__name__}: {error}\n"
            "Its tensors have shapes but no values. --input must be what forward takes, and its "
            "code must not read values (item, tolist, numpy)."
        ) from error
