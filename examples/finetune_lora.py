"""Fine-tune a language model of transformers with LoRA adapters of peft, on several processes.

A tiny Llama first learns the docstrings that come with Python. Then its weights are frozen, and
adapters learn the source code. To adapt a model from the hub, replace `load_base` by
``AutoModelForCausalLM.from_pretrained``; here nothing is downloaded.

Run it as it is, or with ``trainer launch --num_processes 2 examples/finetune_lora.py``, where FSDP2
shards the base and the adapters over the processes; half a minute on two CPU cores. Run it again to
resume. Checkpoints hold only the adapters; at the end they are saved in peft's format.
"""

import argparse
import ast
import math
import sys
import sysconfig
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from trainer import FullyShardedDataParallelPlugin, Trainer, TrainModule, set_seed

CONTEXT = 64  # characters of a sample
UNSEEN = 200  # samples of code that are left for the evaluation


class Language(TrainModule):
    """A causal language model of transformers, which shifts the labels itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, codes, batch_idx):
        loss = self.model(input_ids=codes, labels=codes).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=3e-3)


class Adapted(Language):
    """The same with adapters, of which its checkpoints consist."""

    def state_dict(self, *args, **kwargs):
        state = super().state_dict(*args, **kwargs)
        return {name: value for name, value in state.items() if "lora_" in name}

    def load_state_dict(self, state_dict, strict=True, **kwargs):
        return super().load_state_dict(state_dict, strict=False, **kwargs)


def load_samples():
    """Return docstrings and code of Python's modules as codes of shape (samples, CONTEXT)."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [root / f"{name}.py" for name in sorted(sys.stdlib_module_names)[::3]]
    sources = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, kinds)]
    return [encode("\n\n".join(parts)) for parts in (filter(None, texts), sources)]


def encode(text):
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    return codes[: len(codes) // CONTEXT * CONTEXT].view(-1, CONTEXT)


def fit(module, samples, folder, arguments):
    """Train a module on samples; return the trainer, and the weights on the main process."""
    trainer = Trainer(
        max_steps=arguments.max_steps,
        seed=0,
        log_every=10,
        project_dir=folder,
        fsdp_plugin=FullyShardedDataParallelPlugin(),  # the model knows which of its parts to wrap
    )
    loader = DataLoader(samples, batch_size=arguments.batch_size, shuffle=True)
    trainer.fit(module, loader, ckpt_path="auto")
    weights = trainer.accelerator.get_state_dict(module)  # called by all, gathered on one
    return trainer, {name.removeprefix("model."): value for name, value in weights.items()}


def load_base(docstrings, arguments):
    """Return a pretrained model; train it if there is none yet."""
    folder = arguments.project_dir / "base"
    if not (folder / "config.json").exists():
        sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_attention_heads=4, **sizes))
        trainer, weights = fit(Language(model), docstrings, folder / "training", arguments)
        if trainer.is_global_zero:
            model.save_pretrained(folder, state_dict=weights)
        trainer.accelerator.wait_for_everyone()
    return LlamaForCausalLM.from_pretrained(folder)


@torch.no_grad()
def bits(model, codes):
    """Return the loss in bits per character."""
    return model.eval()(input_ids=codes, labels=codes).loss.item() / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--project-dir", type=Path, default=Path("runs/finetune-lora"))
    parser.add_argument("--max-steps", type=int, default=200, help="of each of the two fits")
    parser.add_argument("--batch-size", type=int, default=16, help="per process")
    arguments = parser.parse_args()

    set_seed(0)
    docstrings, code = load_samples()
    model = get_peft_model(
        load_base(docstrings, arguments),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trained, total = model.get_nb_trainable_parameters()
    folder = arguments.project_dir / "adapters"
    trainer, weights = fit(Adapted(model), code[UNSEEN:], folder / "training", arguments)
    if trainer.is_global_zero:
        model.save_pretrained(folder, state_dict=weights)
        # What follows needs transformers and peft alone.
        base = LlamaForCausalLM.from_pretrained(arguments.project_dir / "base")
        before = bits(base, code[:UNSEEN])
        after = bits(PeftModel.from_pretrained(base, folder), code[:UNSEEN])
        print(
            f"trained     {trained:,} of {total:,} parameters\n"
            f"base        {before:.3f} bits per character on unseen code\n"
            f"adapted     {after:.3f}\n"
            f"metrics     {trainer.metrics_path}\n"
            f"adapters    {folder}"
        )


if __name__ == "__main__":
    main()
