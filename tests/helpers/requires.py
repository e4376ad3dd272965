"""The reasons for which a test may be skipped, all in one place."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.torch_version import TorchVersion

NO_BITSANDBYTES = "needs bitsandbytes: pip install 'cadence-trainer[bnb]'"
NO_DATASETS = "needs Hugging Face's datasets: pip install datasets"
NO_WEBDATASET = "needs webdataset: pip install webdataset"
NO_HYDRA = "needs hydra: pip install hydra-core"  # of which the antlr4 is older than others'
NO_RAY = "needs Ray: pip install 'ray[tune]'"
NO_KUBERNETES_VALIDATE = "needs kubernetes-validate: pip install kubernetes-validate"
NO_TIMM = "needs timm and its torchvision: pip install timm"
NO_CUDA = "needs a CUDA device"


def skip_reason(item: pytest.Item) -> str | None:
    """Return why `item` cannot run on this machine, or None if it can."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        return NO_CUDA
    return None


requires_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason=NO_BITSANDBYTES
)
"""Marks a test that needs the package."""

requires_pipelining = pytest.mark.skipif(
    TorchVersion(torch.__version__) < "2.12", reason="needs torch 2.12; older ones are refused"
)
"""Marks a test that traces a model into pipeline stages."""

requires_datasets = pytest.mark.skipif(find_spec("datasets") is None, reason=NO_DATASETS)
"""Marks a test that needs the package; a stand-in is tested without it."""

requires_webdataset = pytest.mark.skipif(find_spec("webdataset") is None, reason=NO_WEBDATASET)
"""Marks a test that needs the package."""

requires_hydra = pytest.mark.skipif(find_spec("hydra") is None, reason=NO_HYDRA)
"""Marks a test that needs the package."""

requires_ray = pytest.mark.skipif(find_spec("ray") is None, reason=NO_RAY)
"""Marks a test that needs the package."""

requires_cuda = pytest.mark.gpu
"""Marks a test that needs a CUDA device: `@requires_cuda`. Without one it is skipped."""
