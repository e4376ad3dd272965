from typing import Any

from trainer.accelerator import Accelerator as Accelerator
from trainer.big_models import cpu_offload as cpu_offload
from trainer.big_models import cpu_offload_with_hook as cpu_offload_with_hook
from trainer.big_models import disk_offload as disk_offload
from trainer.big_models import dispatch_model as dispatch_model
from trainer.big_models import infer_auto_device_map as infer_auto_device_map
from trainer.big_models import init_empty_weights as init_empty_weights
from trainer.big_models import init_on_device as init_on_device
from trainer.big_models import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
from trainer.big_models import load_checkpoint_in_model as load_checkpoint_in_model
from trainer.configuration import ParallelismConfig as ParallelismConfig
from trainer.data.prepare import skip_first_batches as skip_first_batches
from trainer.enums import DistributedType as DistributedType
from trainer.launch.notebook import debug_launcher as debug_launcher
from trainer.launch.notebook import notebook_launcher as notebook_launcher
from trainer.memory import find_executable_batch_size as find_executable_batch_size
from trainer.rng import synchronize_rng_states as synchronize_rng_states
from trainer.state import PartialState as PartialState

__version__: str

# Other names, and all modules, are looked up when they are used.
def __getattr__(name: str) -> Any: ...
