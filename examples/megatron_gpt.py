"""Train a GPT of megatron-core with pipeline or tensor parallelism on CUDA devices.

``pip install -e ".[megatron]"``, then on a machine with two CUDA devices
``trainer launch --num_processes 2 --use_megatron_lm --megatron_lm_pp_degree 2
--megatron_lm_num_micro_batches 4 examples/megatron_gpt.py``: each process has half of the layers.
``--megatron_lm_tp_degree 2`` divides each layer instead, and without either option the processes
have replicas. Run it again, also with other options, to resume from its last checkpoint.
"""

import argparse
import ast
import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from callbacks import ModelCheckpoint
from trainer import MegatronLMPlugin, Trainer, TrainModule

VOCABULARY = 128  # ASCII
CONTEXT = 64  # characters that the model sees


class LanguageModel(TrainModule):
    def __init__(self, plugin, precision):
        super().__init__()
        self.plugin, self.precision = plugin, precision

    def configure_model(self):
        """Build this process's part of the model, once the processes are connected."""
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.model = GPTModel(
            config=TransformerConfig(
                num_layers=4,
                hidden_size=96,
                num_attention_heads=4,
                use_cpu_initialization=True,
                # Fused kernels need NVIDIA's apex or TransformerEngine.
                gradient_accumulation_fusion=False,
                masked_softmax_fusion=False,
                persist_layer_norm=False,
                **self.plugin.transformer_arguments(self.precision),
            ),
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=CONTEXT,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)  # on stages before the last, the step ends inside
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def loss(self, batch):
        """Return the mean loss over the characters of a batch, in nats."""
        (codes,) = batch
        places = torch.arange(CONTEXT, device=codes.device).expand(len(codes), -1)
        later = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool, device=codes.device).triu(1)
        losses = self.model(
            codes[:, :-1].contiguous(), places, later[None, None], labels=codes[:, 1:].contiguous()
        )
        return losses.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, betas=(0.9, 0.95))


def load_data():
    """Return training and validation samples: the docstrings of Python's modules, cut to length."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    text = "\n\n".join(each for file in files if file.is_file() for each in docstrings(file))
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    samples = codes.unfold(0, CONTEXT + 1, CONTEXT)  # the last character is the next one's first
    for_validation = torch.arange(len(samples)) % 20 == 0
    return TensorDataset(samples[~for_validation]), TensorDataset(samples[for_validation])


def docstrings(path):
    """Return the docstrings of a source file."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/megatron-gpt"))
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=100, help="updates; also evaluates")
    parser.add_argument("--batch-size", type=int, default=32, help="per replica")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    arguments = parser.parse_args(words)

    plugin = MegatronLMPlugin()  # what the launcher was told
    saving = ModelCheckpoint(every=arguments.save_every)
    trainer = Trainer(
        max_steps=arguments.max_steps,
        val_every=arguments.save_every,
        seed=0,
        mixed_precision=arguments.precision,
        max_grad_norm=1.0,
        log_every=20,
        project_dir=arguments.project_dir,
        megatron_lm_plugin=plugin,
        callbacks=saving,
    )
    train_set, val_set = load_data()
    module = LanguageModel(plugin, arguments.precision)
    trainer.fit(
        module,
        DataLoader(train_set, batch_size=arguments.batch_size, shuffle=True),
        DataLoader(val_set, batch_size=64),
        ckpt_path="auto",
    )
    (last,) = trainer.validate(module, DataLoader(val_set, batch_size=64))
    here = sum(parameter.numel() for parameter in module.parameters())
    trainer.accelerator.print(
        f"parameters  {here:,} on this process\n"
        f"loss        {last['val/loss'] / math.log(2):.3f} bits per character on unseen text\n"
        f"checkpoint  {saving.last_model_path}"
    )


if __name__ == "__main__":
    main()
