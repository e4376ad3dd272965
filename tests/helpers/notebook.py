"""A notebook of one cell, run in a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RUN = """
import json, sys, nbclient, nbformat
cell = nbformat.v4.new_code_cell(sys.argv[1])
notebook = nbformat.v4.new_notebook(cells=[cell])
client = nbclient.NotebookClient(notebook, timeout=250, kernel_name="python3", allow_errors=True)
client.execute()
print(json.dumps(cell.outputs))
"""


def outputs_of(cell: str) -> list[dict[str, Any]]:
    """Return the outputs of the cell after it has run, that of its error included."""
    # in a separate process: the client of a kernel leaves threads running for a while
    command = [sys.executable, "-W", "ignore", "-c", RUN, cell]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("PYTEST_CURRENT_TEST", None)  # with which a kernel does not show descriptor 2
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(run.stdout)
