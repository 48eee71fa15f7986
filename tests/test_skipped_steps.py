"""Steps that are left out: which rows are named, and that nothing changes."""

import logging
import math

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from data.batch import Batch, Row, collate
from recipes.errors import UserError
from train.checkpoint import Progress
from train.loop import _report_skipped
from train.shards import run_micro_batch, take_step


class OneWeight(nn.Module):
    """Loss = weight * the first token; `fault` says what goes wrong where that token is 7."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.weight, self.fault = nn.Parameter(torch.ones(1)), fault

    def forward(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        loss = (self.weight * batch.ids_BS[0, 0]).sum()
        if batch.ids_BS[0, 0] == 7 and self.fault == "loss":
            loss = loss * math.nan
        if batch.ids_BS[0, 0] == 7 and self.fault == "gradient":
            loss.register_hook(lambda d_loss: d_loss * math.inf)
        return loss, {}


def make_batch(name: str, token: int, state: float) -> Batch:
    row = Row(id=name, ids_S=torch.tensor([token]), mask_S=torch.ones(1, dtype=torch.bool))
    batch = collate([row])
    batch = Batch(**{**vars(batch), "aux_BSF": torch.full((1, 1, 2), state)})
    return batch


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("loss", "the loss or target states not finite; rows bad"),
        ("states", "the loss or target states not finite; rows bad"),
        ("gradient", "the gradient not finite; rows bad, good"),  # it is the sum of both rows'
    ],
)
def test_step_that_is_not_finite_is_left_out_and_names_its_rows(
    fault: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = Accelerator(cpu=True)
    model = OneWeight(fault)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [
        make_batch("good", 1, 0.0),
        make_batch("bad", 7, math.inf if fault == "states" else 0.0),
    ]
    healthy = []
    for batch in batches:
        healthy.append(run_micro_batch(accelerator, model, batch, 1.0, batch is batches[-1])[0])
    assert not math.isfinite(take_step(accelerator, model, optimizer, 0.5))
    assert model.weight.item() == 1.0 and model.weight.grad is None
    assert not optimizer.state  # no moments were begun

    done = Progress(step=4)
    with caplog.at_level(logging.WARNING, logger="draftsmith"):
        _report_skipped(done, batches, healthy, limit=1)
    assert caplog.messages == [f"step 4: {said}; the step was skipped (1 so far)"]
    with pytest.raises(UserError, match=r"2 steps were skipped, train\.max_skipped_steps is 1"):
        _report_skipped(done, batches, healthy, limit=1)
