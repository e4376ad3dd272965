"""The command `trainer config`: ask about the machine, and save the answers for `launch`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.cli.parsing import CommandError, command_parser, count, echo, truth
from trainer.configuration.fields import Setting
from trainer.enums import DynamoBackend, PrecisionType
from trainer.environment import DEFAULT_PORT, FALSE, TRUE
from trainer.launch.configuration import (
    SUFFIXES,
    LaunchConfiguration,
    default_path,
    device_count,
    load_settings,
    machine_configuration,
    write_file,
)
from trainer.launch.settings import DEEPSPEED, DYNAMO, FP8, FSDP, MEGATRON, MESH, SECTIONS

_SPLIT, _SHARDS, _REPLICAS = (
    f"parallelism_config_{name}_size" for name in ("tp", "dp_shard", "dp_replicate")
)
_PRECISIONS = PrecisionType.list()


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer config`."""
    made = command_parser(
        prog,
        "Ask once how `trainer launch` should start scripts. "
        f"The answers are saved in {default_path()}.",
        examples=[
            ("ask", ""),
            ("use what the machine has, without questions", "--default"),
            ("the same, in bf16", "--default --mixed_precision bf16"),
            ("another file, for `trainer launch`", "--config_file four.yaml"),
            ("rewrite an older file with the current keys", "update --config_file four.yaml"),
        ],
        codes={0: "written", 1: "a file cannot be read or written"},
    )
    add = made.add_argument
    what = "'default' is --default; 'update' rewrites the file without questions"
    add("action", nargs="?", choices=("default", "update"), help=what)
    add("--default", action="store_true", help="use what the machine has, without questions")
    what = "where the answers are saved: .yaml or .json"
    add("--config_file", "--config-file", type=Path, metavar="FILE", help=what)
    what = "with --default: the precision of the forward pass"
    add("--mixed_precision", "--mixed-precision", choices=_PRECISIONS, help=what)
    return made


def run(arguments: argparse.Namespace) -> int:
    """Ask the questions and write the file.

    Returns:
        0.

    Raises:
        argparse.ArgumentTypeError: The arguments are invalid, or there is no terminal to ask on.
        LaunchError: The file to update is invalid.
        CommandError: The file cannot be written.
    """
    place = (arguments.config_file or default_path()).expanduser()
    if place.suffix not in SUFFIXES:
        raise argparse.ArgumentTypeError(
            f"--config_file is {str(place)!r}; it must end in {' or '.join(SUFFIXES)}."
        )
    quick = arguments.default or arguments.action == "default"
    if arguments.action == "update":
        if quick or arguments.mixed_precision:
            raise argparse.ArgumentTypeError(
                "update rewrites the file without questions; it changes no settings."
            )
        chosen = LaunchConfiguration(**load_settings(place))
    elif quick:
        chosen = replace(machine_configuration(), mixed_precision=arguments.mixed_precision or "no")
    elif arguments.mixed_precision:
        raise argparse.ArgumentTypeError("--mixed_precision needs --default.")
    elif not sys.stdin.isatty():
        raise argparse.ArgumentTypeError(
            "there is no terminal to ask questions on. Pass --default to use what the machine has."
        )
    else:
        chosen = _ask(
            LaunchConfiguration(**load_settings(place))
            if place.exists()
            else machine_configuration()
        )
    replaced = ", replacing the earlier answers" if place.exists() else ""
    try:
        write_file(place, chosen)
    except OSError as error:
        raise CommandError(f"{place} cannot be written: {error}") from error
    echo(f"Saved to {place}{replaced}.")
    return 0


# -- the questions ---------------------------------------------------------------------------------


def _ask(known: LaunchConfiguration) -> LaunchConfiguration:
    """Ask all questions; an empty line accepts the known value.

    Settings whose question is skipped here are reset; settings without a question are kept.
    """
    machines = _question("number of machines", known.num_machines, count)
    answers: dict[str, Any] = {"num_machines": machines, **_ask_machines(known, machines)}
    answers["use_cpu"] = device_count() == 0 or _question(
        "use only the CPU (yes, no)", bool(known.use_cpu), truth
    )
    processes = max(known.num_processes or 1, machines)
    answers["num_processes"] = _question("number of processes on all machines", processes, count)
    ids = known.gpu_ids or "all"
    answers["gpu_ids"] = None if answers["use_cpu"] else _question("devices (0,1 or all)", ids, str)
    what, precision = f"precision ({', '.join(_PRECISIONS)})", known.mixed_precision or "no"
    answers["mixed_precision"] = _question(what, precision, _one_of(*_PRECISIONS))
    answers["fp8_config"] = None
    if answers["mixed_precision"] == PrecisionType.FP8:
        fp8 = dict(known.fp8_config or {})
        choose = _one_of("AO", "TE")
        backend = fp8.get("fp8_backend", "AO")
        fp8["fp8_backend"] = _question(FP8["fp8_backend"].question, backend, choose)
        answers["fp8_config"] = fp8
    answers |= _ask_sharding(known, answers["num_processes"], cpu=answers["use_cpu"])
    what, backend = DYNAMO["dynamo_backend"].question, known.dynamo_backend or "no"
    answers["dynamo_backend"] = _question(what, backend, _backend)
    what = "compare shapes before collectives, for debugging (yes, no)"
    answers["debug"] = _question(what, bool(known.debug), truth)
    try:
        return replace(known, **answers)
    except ValueError as error:  # the answers contradict each other
        raise CommandError(str(error)) from error


def _ask_machines(known: LaunchConfiguration, machines: int) -> dict[str, Any]:
    """Ask for the rendezvous of several machines; for a single one, reset these settings."""
    if machines == 1:
        names = ("machine_rank", "main_process_ip", "main_process_port", "rdzv_backend")
        return {name: getattr(LaunchConfiguration(), name) for name in names}
    port, backend = known.main_process_port or DEFAULT_PORT, known.rdzv_backend or "static"
    last = machines - 1
    return {
        "machine_rank": _question(f"rank of this machine (0 to {last})", known.machine_rank, int),
        "main_process_ip": _question("name or address of machine 0", known.main_process_ip, str),
        "main_process_port": _question("a free port of machine 0", port, count),
        "rdzv_backend": _question(
            "rendezvous backend (static, c10d)", backend, _one_of("static", "c10d")
        ),
    }


def _ask_sharding(known: LaunchConfiguration, processes: int, *, cpu: bool) -> dict[str, Any]:
    """Ask how models are split over several processes; for a single one, reset these settings.

    FSDP settings without a question are kept if FSDP is chosen again.
    """
    mesh = known.parallelism_config or {}
    answers: dict[str, Any] = dict.fromkeys(SECTIONS)
    if processes == 1 and known.deepspeed_config is None:
        return answers
    if (fsdp := _ask_fsdp(known.fsdp_config)) is not None:
        answers["fsdp_config"] = fsdp
    elif (chosen := _ask_deepspeed(known.deepspeed_config)) is not None:
        return {**answers, "deepspeed_config": chosen}
    elif not cpu and (megatron := _ask_megatron(known.megatron_lm_config)) is not None:
        return {**answers, "megatron_lm_config": megatron}
    split = _question(MESH[_SPLIT].question, mesh.get(_SPLIT) or 1, count)
    sizes = [size or 1 for name, size in mesh.items() if name.endswith("_size")]
    if split == mesh.get(_SPLIT) and math.prod(sizes) == processes:
        answers["parallelism_config"] = dict(mesh)  # it may have both replicas and shards
    elif split > 1:
        rest = _REPLICAS if answers["fsdp_config"] is None else _SHARDS
        answers["parallelism_config"] = {_SPLIT: split, rest: max(1, processes // split)}
    return answers


def _ask_fsdp(known: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ask how FSDP shards a model; None without FSDP. Settings without a question are kept."""
    if not _question("shard models over the processes, FSDP (yes, no)", known is not None, truth):
        return None
    chosen = dict(known or {"fsdp_version": 2})
    chosen.setdefault("fsdp_reshard_after_forward", True)
    _ask_bools(FSDP, chosen)
    key = "fsdp_transformer_layer_cls_to_wrap"
    if (classes := _question(FSDP[key].question, chosen.pop(key, None) or "none", str)) != "none":
        chosen[key] = classes
    return chosen


def _ask_bools(settings: Mapping[str, Setting], chosen: dict[str, Any]) -> None:
    """Ask for the settings that are booleans, and put the answers into `chosen`."""
    for key, each in settings.items():
        if each.question and each.kind in ("bool", "bool_or_name"):
            known = chosen.get(key, each.fallback)
            if each.kind == "bool" or str(known).lower() in TRUE | FALSE:  # not FSDP 1's FULL_SHARD
                known = truth(str(known))
            chosen[key] = _question(f"{each.question} (yes, no)", known, truth)


def _ask_megatron(known: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ask how Megatron-LM splits a model; None without it. Settings without a question are kept."""
    if not _question("divide a model of megatron-core (yes, no)", known is not None, truth):
        return None
    chosen = dict(known or {})
    for key, each in MEGATRON.items():
        if each.question:
            chosen[key] = _question(each.question, chosen.get(key) or each.fallback, count)
    return chosen


def _ask_deepspeed(known: dict[str, Any] | None) -> dict[str, Any] | None:
    """Ask how DeepSpeed partitions a model and its optimizer; None without DeepSpeed.

    Settings without a question are kept.
    """
    what = "partition models and optimizers with DeepSpeed's ZeRO (yes, no)"
    if not _question(what, known is not None, truth):
        return None
    chosen = dict(known or {})
    key = "deepspeed_config_file"
    file = _question(DEEPSPEED[key].question, chosen.get(key) or "none", str)
    if file != "none":
        kept = ("deepspeed_moe_layer_cls_names", "zero3_init_flag")
        return {**{name: chosen[name] for name in kept if name in chosen}, key: file}
    chosen.pop(key, None)
    asked, known_stage = DEEPSPEED["zero_stage"].question, int(chosen.get("zero_stage", 2))
    chosen["zero_stage"] = stage = int(_question(asked, known_stage, _one_of("0", "1", "2", "3")))
    for key, least in (("offload_optimizer_device", 1), ("offload_param_device", 3)):
        if stage < least:
            chosen.pop(key, None)
        else:
            there = chosen.get(key, "none") == "cpu"
            asked = f"{DEEPSPEED[key].question} (yes, no)"
            chosen[key] = "cpu" if _question(asked, there, truth) else "none"
    if stage == 3:
        _ask_bools(DEEPSPEED, chosen)
    else:
        for key in ("zero3_init_flag", "zero3_save_16bit_model"):
            chosen.pop(key, None)
    return chosen


def _question(what: str, default: Any, convert: Callable[[str], Any]) -> Any:
    if isinstance(default, bool):
        shown = "yes" if default else "no"
    else:
        shown = "" if default is None else str(default)
    while True:
        try:
            text = input(f"{what} [{shown}]: ").strip()
        except EOFError:
            echo()  # end the line of the question
            raise CommandError(
                "the input ended before all questions were answered; no answer is saved."
            ) from None
        if not text and default is not None:
            return default
        try:
            return convert(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            echo(f"  {error}")


def _one_of(*choices: str) -> Callable[[str], str]:
    def convert(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} must be one of {', '.join(choices)}")
        return text

    return convert


def _backend(text: str) -> str:
    return DynamoBackend.parse(text.upper(), "the backend").lower()
