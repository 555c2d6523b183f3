"""Base class with the hooks and steps that Lightning's Trainer calls in validation, test and prediction."""

from collections.abc import Callable
from functools import partial
from typing import Any

from typing_extensions import override

from lightning_fsdp2.strategies.parts.evaluation import Evaluation
from lightning_fsdp2.strategies.world_strategy import WorldStrategy


class EvaluatingStrategy(WorldStrategy):
    """Strategy whose evaluation steps are collectives of all ranks.

    Attributes:
        evaluation: Runner of validation, test and prediction steps. Subclasses set it.
    """

    evaluation: Evaluation
    _step_region: Any

    def begin_evaluation(self) -> None:
        """Prepare for the first step of a validation, test or prediction run."""

    def end_evaluation(self) -> None:
        """Clean up after the last step of a validation, test or prediction run."""

    def run_evaluation_step(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the module's step ``name``, such as ``"validation_step"``, on a batch."""
        return step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        self.begin_evaluation()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", super().validation_step, *args, **kwargs)

    @override
    def on_validation_end(self) -> None:
        self.end_evaluation()

    @override
    def on_test_start(self) -> None:
        self.begin_evaluation()

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", super().test_step, *args, **kwargs)

    @override
    def on_test_end(self) -> None:
        self.end_evaluation()

    @override
    def on_predict_start(self) -> None:
        self.begin_evaluation()
        self.evaluation.begin_predictions(self.lightning_module.trainer.predict_loop.max_batches)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        step = partial(self.run_evaluation_step, "predict_step", super().predict_step, *args, **kwargs)
        return self.evaluation.run_prediction(self._step_region, self.lightning_module, step)

    @override
    def on_predict_end(self) -> None:
        self.end_evaluation()

    def _evaluate(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step = partial(self.run_evaluation_step, name, step, *args, **kwargs)
        return self.evaluation.run(self._step_region, self.lightning_module, step)
