"""Hooks of Lightning, and of Hugging Face's Trainer and its callbacks, that are not called.

A method that a user has written and nobody calls is a silent mistake. Each hook of LightningModule,
LightningDataModule and Lightning's Callback, of its releases 1.5 to 2.x, is therefore either called
here too or refused before anything runs, with what to use. So are those of a TrainerCallback, and
the methods that subclasses of Hugging Face's Trainer override, but for those that a user's own code
may call.
"""

from __future__ import annotations

from collections.abc import Iterable

from trainer.errors import module_logger

logger = module_logger(__name__)

MANUAL = "set automatic_optimization = False and do it in training_step"
_EPOCH_END = (
    "outputs are not collected: keep what you need in a list of your own in {0}_step, and use and "
    "clear it in on_{1}_epoch_end(self); metrics need only self.log in {0}_step"
)
_STEP_END = "do it at the end of {0}_step: every process runs the whole step on its own batch"
_MODE = (
    "the whole module is put in evaluation mode and each part back into its own afterwards; parts "
    "that you set to eval() stay so"
)

_EVERYWHERE = {
    "on_epoch_start": "use on_train_epoch_start, on_validation_epoch_start or on_test_epoch_start",
    "on_epoch_end": "use on_train_epoch_end, on_validation_epoch_end or on_test_epoch_end",
    "on_batch_start": "use on_train_batch_start",
    "on_batch_end": "use on_train_batch_end",
    "on_pretrain_routine_start": "use on_fit_start",
    "on_pretrain_routine_end": "use on_fit_start",
    "on_hpc_save": "use on_save_checkpoint",
    "on_hpc_load": "use on_load_checkpoint",
}
_MODULE = _EVERYWHERE | {
    "training_epoch_end": _EPOCH_END.format("training", "train"),
    "validation_epoch_end": _EPOCH_END.format("validation", "validation"),
    "test_epoch_end": _EPOCH_END.format("test", "test"),
    "training_step_end": _STEP_END.format("training"),
    "validation_step_end": _STEP_END.format("validation"),
    "test_step_end": _STEP_END.format("test"),
    "configure_callbacks": "pass them to Trainer(callbacks=[...])",
    "configure_sharded_model": "rename it to configure_model",
    "tbptt_split_batch": f"{MANUAL}, splitting the batch there",
    "log_grad_norm": "log the norms in on_before_optimizer_step",
    "on_validation_model_zero_grad": "gradients are dropped before each validation",
    **{
        f"on_{phase}_model_{mode}": _MODE
        for phase in ("validation", "test", "predict")
        for mode in ("eval", "train")
    },
    **{
        f"on{reset}_{phase}_dataloader": f"do it in {phase}_dataloader"
        for reset in ("", "_reset")
        for phase in ("train", "val", "test", "predict")
    },
    "on_post_move_to_device": "use on_fit_start; tie weights in __init__ or configure_model",
    **dict.fromkeys(
        (
            "on_sanity_check_start",
            "on_sanity_check_end",
            "on_boundary",
            "on_preemption",
            "on_exception",
        ),
        "only callbacks have this hook: put it in a callbacks.Callback",
    ),
}
_CALLBACK = _EVERYWHERE | {
    "on_init_start": "use setup",
    "on_init_end": "use setup",
    "on_before_accelerator_backend_setup": "use setup",
    "on_configure_sharded_model": "use setup",
    "on_keyboard_interrupt": "use on_exception, which is told a KeyboardInterrupt too",
    "on_epoch_begin": "use on_train_epoch_start",
    "on_evaluate": "use on_validation_end, unless trainer.sanity_checking",
    "on_log": "use on_boundary, which finds the values in trainer.callback_metrics",
    "on_optimizer_step": "use on_train_step_end",
    "on_pre_optimizer_step": "use on_before_optimizer_step",
    "on_predict": "use on_predict_end",
    "on_prediction_step": "use on_validation_batch_end",
    "on_push_begin": "use the files in trainer.project_dir, after fit",
    "on_save": (
        "use on_boundary with trainer.wait_for_save(), after which the folder is there; "
        "on_save_checkpoint adds to what is saved"
    ),
    "on_step_begin": "use on_train_step_start",
    "on_step_end": "use on_train_step_end",
    "on_substep_end": "use on_train_batch_end",
    "on_train_begin": "use on_train_start",
    "write_on_batch_end": "use on_predict_batch_end",
    "write_on_epoch_end": (
        "use on_predict_batch_end, which gets the outputs of each batch, or read the files of a "
        "PredictionWriter after predict"
    ),
}
# What only callbacks of a certain kind are asked for, by the name of the class.
_OF_KIND = {
    "ModelCheckpoint": {
        "format_checkpoint_name": (
            "a folder is named after its update, and its manifest.json has the metrics"
        ),
    },
    "ProgressBar": dict.fromkeys(
        (
            "get_metrics",
            *(
                f"init_{phase}_tqdm"
                for phase in ("sanity", "train", "validation", "test", "predict")
            ),
        ),
        "the bar shows what self.log is given with prog_bar=True",
    ),
    "WeightAveraging": {
        "should_update": (
            "pass update_every_n_steps=, update_starting_at_step= or update_starting_at_epoch="
        ),
    },
}
_MODULES_OWN = "define {} in the module, a trainer.TrainModule"
_LOADERS = "pass the loader to fit, or " + _MODULES_OWN
_TRAINER = {
    "_get_eval_sampler": _LOADERS.format("val_dataloader"),
    "_get_train_sampler": _LOADERS.format("train_dataloader"),
    "compute_loss": "the loss is what training_step of the module returns",
    "create_optimizer": _MODULES_OWN.format("configure_optimizers"),
    "create_optimizer_and_scheduler": _MODULES_OWN.format("configure_optimizers"),
    "create_scheduler": _MODULES_OWN.format("configure_optimizers"),
    "evaluation_loop": _MODULES_OWN.format("validation_step"),
    "prediction_step": _MODULES_OWN.format("validation_step or predict_step"),
    "training_step": _MODULES_OWN.format("training_step"),
}


def uncalled_hooks(kind: str, bases: Iterable[type]) -> dict[str, str]:
    """Return the hooks that nobody would call, each with what to use.

    Args:
        kind: ``"module"``, ``"callback"``, ``"datamodule"`` or ``"trainer"``.
        bases: The classes that the owner of the hooks inherits from.
    """
    refused: dict[str, str] = {
        "module": _MODULE,
        "callback": _CALLBACK,
        "datamodule": _EVERYWHERE,
        "trainer": _TRAINER,
    }[kind]
    for each in bases:
        if each.__module__.startswith("callbacks."):
            refused = refused | _OF_KIND.get(each.__name__, {})
        if each.__module__.startswith("trainer.lightning."):  # which calls them
            refused = {name: use for name, use in refused.items() if name not in vars(each)}
    return refused


def check_uncalled_hooks(owner: object, kind: str) -> None:
    """Refuse a hook of another trainer, which nobody would call.

    Args:
        owner: The user's module, callback or datamodule, or a Trainer.
        kind: As for `uncalled_hooks`.

    Raises:
        TypeError: It has one; the text says what to use.
    """
    refused = uncalled_hooks(kind, type(owner).__mro__)
    for name in sorted(refused):
        # Not getattr of the owner: a layer may have such a name, and it is no method.
        if callable(getattr(type(owner), name, None)):
            raise TypeError(
                f"{type(owner).__name__} defines {name}, which is never called here: "
                f"{refused[name]}. (If your own code calls it, give it another name.)"
            )
