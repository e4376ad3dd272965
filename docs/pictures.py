"""Draw docs/images/run.png: the report of the run on the landing page. Needs chromium.

``python docs/pictures.py`` runs the page's program, and prints what the page shows of it.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
SIZE = "1080,530"
CHROMIUM = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]


def main() -> None:
    """Run the program, write its report, and take a picture of it."""
    page = (DOCS / "index.md").read_text()
    program = re.search(r'^```python title="train.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    assert program is not None
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(program[1])
        subprocess.run([sys.executable, "train.py"], cwd=folder, check=True)
        report = [sys.executable, "-m", "trainer", "report", "runs/net"]
        subprocess.run(report, cwd=folder, check=True)
        picture = DOCS / "images" / "run.png"
        subprocess.run(
            [
                *CHROMIUM,
                f"--window-size={SIZE}",
                f"--user-data-dir={folder}/profile",
                f"--screenshot={picture}",
                Path(folder, "report.html").as_uri(),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )


if __name__ == "__main__":
    main()
