"""The command `trainer merge-weights`: merge sharded weights into one safetensors file."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer.checkpoint.storage import MANIFEST
from trainer.cli.parsing import CommandError, command_parser, echo
from trainer.errors import CheckpointError
from trainer.strict_json import dumps


def parser(prog: str) -> argparse.ArgumentParser:
    """Return the parser of `trainer merge-weights`."""
    made = command_parser(
        prog,
        "Write the weights of a checkpoint to one safetensors file, however many shards they "
        "have. It needs memory for one tensor at a time.",
        examples=[
            ("shards and their index, as save_model writes them", "exported merged.safetensors"),
            ("a run's checkpoint", "runs/digits/checkpoints/step-00000100 digits.safetensors"),
        ],
        codes={0: "the file was written and verified", 1: "no intact weights, or OUTPUT exists"},
    )
    what = "a folder with model.safetensors or shards, or an index or shard file in it"
    made.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help=what)
    made.add_argument("output", type=Path, metavar="OUTPUT", help="the new file, NAME.safetensors")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    made.add_argument("--json", action="store_true", help="print JSON")
    return made


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command.

    Returns:
        0.

    Raises:
        CommandError: There are no intact weights, or the output already exists.
        OSError: A file cannot be read or written.
    """
    from trainer.checkpoint.shards import merge_weights

    output = arguments.output.expanduser()
    if output.exists() and not arguments.force:
        raise CommandError(f"{output} already exists; pass --force to replace it.")
    try:
        merged = merge_weights(arguments.checkpoint.expanduser(), output)
    except (CheckpointError, ValueError) as error:
        folder = arguments.checkpoint.expanduser()  # maybe a run's folder; suggest its newest
        found = [file for of in ("*", "checkpoints/*") for file in folder.glob(f"{of}/{MANIFEST}")]
        newest = max(found, key=lambda file: file.stat().st_mtime, default=None)
        hint = f" Did you mean {newest.parent}?" if newest else ""
        raise CommandError(f"{error}{hint}") from None
    if arguments.json:
        report = {"output": str(output), **vars(merged), "files": list(map(str, merged.files))}
        echo(dumps(report, indent=1))
        return 0
    tied = f" (and {merged.tied} more names for them)" if merged.tied else ""
    count = len(merged.files)
    echo(f"{merged.tensors} tensors{tied} from {count} file{'' if count == 1 else 's'}")
    echo(f"{output}: {merged.size} bytes, sha256 {merged.sha256}")
    return 0
