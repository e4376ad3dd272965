"""The shape of accelerate's complete_nlp_example: accumulate, evaluate, track, save and resume."""

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch.utils.data import DataLoader


class Kept(GeneralTracker):
    """A tracker of the script's own."""

    name = "kept"
    requires_logging_directory = False

    @on_main_process
    def __init__(self):
        super().__init__()
        self.records = []

    @property
    def tracker(self):
        return self.records

    @on_main_process
    def store_init_configuration(self, values):
        self.records.append(("config", dict(values)))

    @on_main_process
    def log(self, values, step=None, **kwargs):
        self.records.append((step, dict(values)))


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(30, 8, padding_idx=0)
        self.drop = torch.nn.Dropout(0.0)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask, labels):
        mask = attention_mask.unsqueeze(-1)
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.head(self.drop(mean))
        return torch.nn.functional.cross_entropy(logits, labels), logits


def dataset(size, seed):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (size,), generator=draw).tolist()
    rows = [torch.randint(1, 30, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "label": int(row.sum()) % 3} for row in rows]


def collate(rows):
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).float(), "labels": labels}


def make(config, folder, tracker):
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=config["accumulate"],
        log_with=[tracker],
        project_config=ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=False),
        dataloader_config=DataLoaderConfiguration(even_batches=True),
    )
    set_seed(config["seed"])
    train = DataLoader(dataset(52, 0), config["batch"], collate_fn=collate)
    evaluate = DataLoader(dataset(21, 1), config["batch"], collate_fn=collate)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=20)
    return accelerator, accelerator.prepare(model, optimizer, train, evaluate, schedule)


def main(folder):
    config = {"lr": 0.05, "seed": 42, "batch": 4, "accumulate": 2, "epochs": 3}
    PartialState(cpu=True)  # before the tracker, which asks for the main process
    tracker = Kept()
    accelerator, prepared = make(config, folder, tracker)
    model, optimizer, train, evaluate, schedule = prepared
    accelerator.init_trackers("nlp", config)

    losses, metrics, rates = [], [], []

    def epoch(number, batches, save_after=None):
        model.train()
        total = 0.0
        for index, batch in enumerate(batches, start=1):
            with accelerator.accumulate(model):
                loss, _ = model(**batch)
                total += loss.detach().float()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).tolist())
            rates.append(schedule.get_last_lr()[0])
            if index == save_after:
                accelerator.save_state(f"{folder}/step")
        model.eval()
        right = counted = 0
        for batch in evaluate:
            with torch.no_grad():
                _, logits = model(**batch)
            guesses, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
            right += int((guesses == labels).sum())
            counted += len(labels)
        metrics.append((right, counted))
        accelerator.log({"accuracy": right / counted, "loss": float(total)}, step=number)

    epoch(0, train)
    epoch(1, train)
    epoch(2, train, save_after=2)
    weights = accelerator.get_state_dict(model)

    # The second run: from the saved state, in the middle of the epoch.
    accelerator.load_state(f"{folder}/step")
    accelerator.wait_for_everyone()
    if hasattr(train, "set_epoch"):
        train.set_epoch(2)
    epoch(2, accelerator.skip_first_batches(train, 2))
    accelerator.end_training()
    return {
        "losses": losses,
        "metrics": metrics,
        "rates": rates,
        "records": getattr(tracker, "records", None),
        "weights": {name: weight.tolist() for name, weight in weights.items()},
    }
