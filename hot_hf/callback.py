"""HOTCallback: HOT inside a transformers Trainer."""

from __future__ import annotations

import json
import logging
import weakref
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import DefaultFlowCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from .config import CONFIG_NAME, HOTConfig
from .fit import configure_fit
from .layer_kinds import hot_layers
from .layers import HOTMixin
from .monitor import GradientErrors, KeptMeter, NonFiniteGradients, never_called, stop_measuring
from .patching import HOTPatchError, advice_on_adapters, apply_hot, patched_as_a_whole, report_of
from .report import CoverageReport
from .saving import configurations, save_beside, save_config_with
from .selected_plan import SelectedPlan
from .selection import fix_selection

logger = logging.getLogger(__name__)


class HOTCallback(TrainerCallback, ExportableState):
    """Patch the model when training starts, choose quantizers in flight, and log what was measured.

    ::

        callback = HOTCallback()
        trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        callback.report_through(trainer)  # where report_to names reporters

    A model that is patched already keeps its own configuration, and is left alone unless layers have been made since:
    adapters, say, whose ``lora_A`` is then patched too (the whole model once more, so that a selection starts anew).
    With ``grad_input_granularity="lqs"`` the choices are fixed, on all ranks at once, at the end of the step in which
    ``lqs_batches`` micro-batches have been seen; they are saved with the checkpoint and taken from it on resume, where
    the configuration is still the one that they were measured with. The same holds for
    ``selection="budget"``, whose plan (docs/selection.md) becomes ``hot_plan.json`` beside the ``hot_config.json`` that
    checkpoints, ``model.save_pretrained``, ``trainer.save_model`` and pushes get.

    What ``state.log_history``, the console and reporters receive beside the loss, prefixed ``hot/``:

    * ``coverage``: share of the multiply-adds that lies in patched layers, when training starts; all about it is in
      ``hot_hf.report_of(model)``, and its summary in ``logging.getLogger("hot_hf")``: a warning where the share is
      below a half, else at level INFO;
    * ``kept_bytes``: most bytes of packed inputs and scales alive at once since the last log; absent while none were
      seen (layers that are frozen, compiled, or still measuring);
    * ``nonfinite_gradients``, ``nonfinite_steps``: gradients, and optimizer steps, with a NaN or infinity so far;
      absent where there is no gradient to look at, as under DeepSpeed. Counted on the first rank alone, without
      communication: under DDP all ranks have the same gradients, under FSDP a rank sees its own shard, and a NaN in
      another one only with gradient clipping (``max_grad_norm``, on by default), which spreads it to all;
    * ``layers/PLAN``: layers by what they do, when training starts and when the choices are fixed;
    * ``never_called``: patched layers whose forward did not run in the first steps; a warning names them;
    * ``grad_input_error/LAYER``, ``grad_weight_error/LAYER``: relative Frobenius errors of sampled layers, the one that
      costs: only with a reporter (``report_to``, none by default).

    The count of non-finite gradients is one pass over them in every optimizer step: for 133 million in float32, on one
    busy CPU core, 0.17 s, half of what ``clip_grad_norm_`` takes, which Trainer calls in every step as well. Metering a
    packed input takes about 10 us.

    Args:
        hot_config: a HOTConfig, a dict, a preset name, or None for the default.
        error_every: measure gradient errors every so many steps; 0 for never.
        error_layers: how many layers to measure, spread evenly over the model.
        audit_steps: steps after which layers that were never called are named; 0 for never.
    """

    def __init__(
        self,
        hot_config: HOTConfig | dict | str | None = None,
        error_every: int = 100,
        error_layers: int = 4,
        audit_steps: int = 2,
    ) -> None:
        self.hot_config = None if hot_config is None else HOTConfig.coerce(hot_config)
        self.error_every, self.error_layers, self.audit_steps = error_every, error_layers, audit_steps
        # Of the run that has ended, or that a checkpoint comes from; what a run's layers have chosen is read off them.
        self._saved: dict[str, str | dict[str, Any]] = {}
        self.measured_with = ""  # the configuration they were measured with, as JSON
        self.batch_size: int | None = None  # rows of a micro-batch of this run
        self._model: weakref.ref | None = None
        self._reports = False
        self._errors: GradientErrors | None = None
        self._metered: weakref.WeakSet[HOTMixin] = weakref.WeakSet()
        self._forget()

    def _forget(self) -> None:
        """Drop what belongs to one run, whether it has come to its end or not."""
        if self._errors is not None:
            self._errors.stop()
        for layer in self._metered:
            if isinstance(layer, HOTMixin):  # not removed since
                layer.hot.meter = None
        self._metered.clear()
        self._first_step = 0
        self._saves_config = False  # by the model's save_pretrained, in whatever folder
        self._measured: list = []
        self._meter: KeptMeter | None = None
        self._errors: GradientErrors | None = None
        self._non_finite: NonFiniteGradients | None = None
        self._once: dict[str, float] = {}  # values for the next log only

    @property
    def selection(self) -> dict[str, str | dict[str, Any]]:
        """What was chosen, by layer: the granularity from lqs, all settings of the plan from a budget."""
        model = None if self._model is None else self._model()
        chosen = {} if model is None else {m.hot.name: m.hot for m in hot_layers(model) if m.hot.chosen}
        found = {
            name: hot.plan.grad_input_granularity if hot.config.selection is None else asdict(hot.plan)
            for name, hot in chosen.items()
        }
        return found or self._saved

    @selection.setter
    def selection(self, saved: dict[str, str | dict[str, Any]]) -> None:
        self._saved = dict(saved)

    def report_through(self, trainer: Trainer) -> None:
        """Let ``trainer``'s reporters (TensorBoard, W&B ...) see the ``hot/`` values: Trainer calls them before the
        user's callbacks, and this puts the callback in front of them. ``state.log_history`` and the console have the
        values in any case.

        Raises:
            ValueError: where this callback is none of ``trainer``'s.
        """
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            raise ValueError("HOTCallback.report_through: this callback is none of the trainer's: add it first.")
        callbacks.remove(self)
        first = next((i for i, c in enumerate(callbacks) if not isinstance(c, DefaultFlowCallback)), len(callbacks))
        callbacks.insert(first, self)
        self._reports = True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the arguments, and the choices that all ranks agreed on."""
        return {
            "args": {
                "hot_config": None if self.hot_config is None else self.hot_config.to_dict(),
                "error_every": self.error_every,
                "error_layers": self.error_layers,
                "audit_steps": self.audit_steps,
            },
            "attributes": {
                "selection": dict(self.selection),
                "measured_with": self.measured_with,
                "batch_size": self.batch_size,
            },
        }

    # Events

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._forget()
        self._first_step = state.global_step
        stop_measuring(model)  # another callback's run may have ended with an error
        report = self._patch(state, model)
        self._saves_config = save_config_with(model)
        self._model = weakref.ref(model)
        self._restore_selection(state, model)
        self.batch_size = state.train_batch_size
        configure_fit(model, _optimizer_kind(args), args.gradient_accumulation_steps > 1, not args.disable_tqdm)
        self._measured = [layer for layer in hot_layers(model) if layer.hot.probe is not None]
        if args.n_gpu > 1:
            logger.warning(
                f"HOTCallback: one process drives {args.n_gpu} GPUs: Trainer wraps the model in nn.DataParallel, whose "
                "threads share every layer's state; selection and stochastic rounding are untested there. Start one "
                "process per GPU instead, with torchrun or accelerate launch (scripts/launch)."
            )
        # Resuming from a checkpoint that was written without this callback: the next save looks it up by name.
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.is_world_process_zero:
            self._once["coverage"] = round(report.multiply_add_share, 4)
            self._start_measuring(args, model)

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        layers = hot_layers(model)
        for clock in {id(layer.hot.clock): layer.hot.clock for layer in layers}.values():
            clock.set(state.global_step * args.gradient_accumulation_steps)
        if self._errors is not None and state.global_step % self.error_every == 0:
            self._errors.start()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self._non_finite is not None:
            self._non_finite.count(model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        steps = state.global_step - self._first_step
        if self._errors is not None:
            self._once.update(self._errors.stop())
        # Counted in steps, which ranks share; what a rank's own layers have recorded is not.
        if self._measured and steps * args.gradient_accumulation_steps >= self._measured[0].hot.config.lqs_batches:
            fix_selection(model)
            self.measured_with = _as_json(model)
            if any(m.hot.choice is not None for m in self._measured):
                logger.info(f"HOTCallback:\n{SelectedPlan.of(model)}")
            self._measured = []
            self._count_layers(model)
        if steps == self.audit_steps and not args.torch_compile:  # compiled forwards leave no trace
            self._audit(model)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._meter is None or logs is None or "loss" not in logs:
            return
        values = {"kept_bytes": self._meter.take_peak()} if self._meter.seen else {}
        if (counts := self._non_finite.read()) is not None:
            values["nonfinite_gradients"], values["nonfinite_steps"] = counts
        values = {f"hot/{name}": value for name, value in {**values, **self._once}.items()}
        self._once = {}
        logs.update(values)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(values)

    def on_save(self, args, state, control, model=None, **kwargs):
        directory = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if not state.is_world_process_zero or not hot_layers(model):
            return
        if directory.is_dir():
            save_beside(model, directory)
        elif not self._saves_config:
            logger.warning(
                f"HOTCallback: there is no folder {directory}, so this checkpoint gets no {CONFIG_NAME}. Save it "
                "yourself: hot_hf.config_of(model).save_pretrained(folder)."
            )

    def on_push_begin(self, args, state, control, model=None, **kwargs):
        # What is uploaded is output_dir, into which Trainer copies the checkpoint's files that it knows.
        if state.is_world_process_zero and model is not None:
            save_beside(model, args.output_dir)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        self.selection = self.selection  # to be told when the model is gone
        stop_measuring(model)
        self._forget()

    # Parts

    def _patch(self, state, model) -> CoverageReport:
        """Patch what is to be patched and is not; the report on the whole."""
        found = configurations(model)
        if not found:
            report = apply_hot(model, self.hot_config)
            if state.is_world_process_zero:
                report.announce()
            return report
        if self.hot_config is not None and any(config != self.hot_config for config, _ in found):
            logger.warning("HOTCallback: the model is patched already and keeps its configuration, not the callback's.")
        report = report_of(model)
        whole = patched_as_a_whole(model) and len(found) == 1
        if whole and self._is_outdated(state, model):
            report = apply_hot(model, found[0][0])
            advice = None
            logger.info("HOTCallback: the size of micro-batches has changed: plans are measured anew.")
        elif not report.unseen:
            advice = advice_on_adapters(model)
        elif whole:
            advice = None
            made, shown = [name for name in report.unseen if ".lora_" not in name], _shown(report.unseen)
            try:
                report = apply_hot(model, found[0][0])
                logger.log(
                    logging.WARNING if made else logging.INFO,
                    f"HOTCallback: patched what was made since apply_hot: {shown}.\n{report.summary}",
                )
            except HOTPatchError as error:
                advice = f"HOTCallback: layers made since apply_hot stay exact ({shown}): {error}"
        else:  # a part of it was patched, on purpose
            adapters = [name for name in report.unseen if ".lora_" in name]
            advice = adapters and (
                f"HOTCallback: adapters made since apply_hot are not patched: {_shown(adapters)}. Only parts of this "
                "model were given to apply_hot: call it on them once more, with the configuration they have."
            )
        if advice and state.is_world_process_zero:
            logger.warning(advice)
        return report

    def _restore_selection(self, state, model) -> None:
        """The choices of the run that is resumed, if it had this configuration; a new run measures anew, with another
        model perhaps."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        saved = (saved[0] if isinstance(saved, list) else saved).get("attributes", {})
        probing = [layer.hot for layer in hot_layers(model) if layer.hot.probe is not None]
        choices = dict(saved.get("selection", {}))
        self._saved = {}
        self.measured_with = _as_json(model)
        if choices and probing and _as_settings(saved.get("measured_with", "")) != _as_settings(self.measured_with):
            choices = {}
            logger.warning(
                "HOTCallback: the checkpoint's quantizers were selected with another configuration than this run's. "
                f"They are not used: the next {probing[0].config.lqs_batches} micro-batches are measured anew, with "
                "exact gradients meanwhile."
            )
        for hot in probing:
            if hot.name in choices:
                choice = choices[hot.name]
                changes = choice if isinstance(choice, dict) else {"grad_input_granularity": choice}
                hot.take(replace(hot.plan, **changes))

    def _is_outdated(self, state, model) -> bool:
        """Whether a run that begins on a model which an earlier run of this callback has measured has micro-batches of
        another size (``auto_find_batch_size`` after an out-of-memory error): errors and bytes were those of the old
        ones. A run that is resumed goes on with what it had."""
        earlier = None if self._model is None else self._model()
        if state.global_step or earlier is not model or self.batch_size in (None, state.train_batch_size):
            return False
        return any(m.hot.chosen or m.hot.probe is not None for m in hot_layers(model))

    def _start_measuring(self, args, model) -> None:
        if args.report_to and not self._reports:
            logger.warning(
                f"HOTCallback: Trainer calls {', '.join(args.report_to)} before this callback, so that they get no "
                "hot/ values; state.log_history and the console do. Call callback.report_through(trainer) before "
                "trainer.train()."
            )
        self._meter, self._non_finite = KeptMeter(), NonFiniteGradients()
        for layer in hot_layers(model):
            layer.hot.meter = self._meter
            self._metered.add(layer)
        if args.report_to and self.error_every and not args.torch_compile:
            self._errors = GradientErrors.sample(model, self.error_layers)
        self._count_layers(model)

    def _count_layers(self, model) -> None:
        plans = Counter(
            "measuring" if layer.hot.probe is not None else layer.hot.plan.label() for layer in hot_layers(model)
        )
        self._once.update({f"layers/{label.replace(' / ', ', ')}": count for label, count in plans.items()})

    def _audit(self, model) -> None:
        names = never_called(model)
        self._once["never_called"] = len(names)
        if names:
            logger.warning(
                f"HOTCallback: {len(names)} patched layers were never called in the first {self.audit_steps} steps, so "
                f"HOT does nothing for them (the model reads their weights itself, or does not use them): "
                f"{_shown(names)}. "
                "Leave them out with HOTConfig(exclude=[...])."
            )


def _shown(names: list[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _as_json(model) -> str:
    """The model's configuration, or several, as a checkpoint keeps them; the order of overrides counts."""
    return json.dumps([config.to_dict() for config, _ in configurations(model)])


def _as_settings(measured_with: str) -> list[dict[str, Any]]:
    """Configurations that ``_as_json`` wrote, with the fields that HOTConfig has gained since."""
    return [HOTConfig.from_dict(settings).to_dict() for settings in json.loads(measured_with or "[]")]


def _optimizer_kind(args) -> str:
    """``TrainingArguments.optim`` as one of the kinds whose state can be counted; others take AdamW's at most."""
    name = str(getattr(args.optim, "value", args.optim))
    kinds = {"8bit": "adamw_8bit", "adafactor": "adafactor", "sgd": "sgd", "lion": "momentum"}
    return next((kind for part, kind in kinds.items() if part in name), "adamw")
