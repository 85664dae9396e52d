"""The training loop. It reads as the algorithm; how things are done stands in the parts it calls."""

from __future__ import annotations

import logging

from vime.config import Config
from vime.run import Run, open_run

logger = logging.getLogger(__name__)


def train(config: Config) -> None:
    """Run a whole training, from what ``config`` says to the last checkpoint.

    Raises:
        VimeError: with one message that names what failed; everything that was started has been stopped by then.
    """
    with open_run(config) as run:
        loop = supervised if config.train.loss_type == "sft_loss" else reinforce
        loop(run)
        with run.tracker.phase("export"):
            run.export(run.num_rollout)
        print(run.tracker.table())


def reinforce(run: Run) -> None:
    """Generate and reward, learn, bring the new weights to the engines; again."""
    trainer, rollout, serving, tracker = run.trainer, run.rollout, run.serving, run.tracker
    assert serving is not None
    with tracker.phase("first sync"):
        serving.start(version=run.first_rollout)

    for rollout_id in range(run.first_rollout, run.num_rollout):
        if run.eval_due(rollout_id):
            evaluate(run, rollout_id)
        with tracker.phase("generate"):
            what, seconds = f"generating rollout {rollout_id}", rollout.longest()
            samples = trainer.while_alive(what, seconds, rollout.generate, rollout_id)
        with tracker.phase("hand_over"):
            serving.to_trainer()
        with tracker.phase("train"):
            learned = trainer.train(rollout_id, rollout.to_train_batch(samples))
        tracker.samples(rollout_id, samples)
        tracker.log(rollout_id, {**rollout.metrics(samples), **learned})
        # After its numbers are on the disk, before the engines can fail: a run that continues has both, or neither.
        if run.save_due(rollout_id):
            with tracker.phase("save"):
                run.save(rollout_id)
        with tracker.phase("update_weights"):
            synced = serving.to_engines(version=rollout_id + 1)
        tracker.log(rollout_id, {f"sync/{name}": value for name, value in synced.items()})

    if run.eval_due(run.num_rollout):
        evaluate(run, run.num_rollout)


def evaluate(run: Run, rollout_id: int) -> None:
    """Answer the evaluation prompts with the weights that ``rollout_id`` rollouts have made."""
    with run.tracker.phase("eval"):
        what, seconds = f"evaluating at {rollout_id}", run.rollout.longest(evaluation=True)
        metrics = run.trainer.while_alive(what, seconds, run.rollout.evaluate, rollout_id)
    for name, samples in run.rollout.eval_samples.items():
        run.tracker.samples(rollout_id, samples, source=f"eval/{name}")
    run.tracker.log(rollout_id, metrics)


def supervised(run: Run) -> None:
    """Learn from the answers that stand in the prompt file; no engine takes part."""
    for rollout_id in range(run.first_rollout, run.num_rollout):
        with run.tracker.phase("train"):
            learned = run.trainer.train(rollout_id, run.rollout.sft_batch(rollout_id))
        run.tracker.log(rollout_id, learned)
        if run.save_due(rollout_id):
            with run.tracker.phase("save"):
                run.save(rollout_id)
