"""Tests on an XLA device, which `make test-xla` runs: others do without torch_xla."""

from trainer.utils import is_torch_xla_available

collect_ignore_glob = [] if is_torch_xla_available() else ["test_*.py"]
