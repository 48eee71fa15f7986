"""On-policy rows: answers that the drafter itself writes, which the target then judges.

Dimension letters: B rows of the batch, R rows written, N tokens of a pass, S positions.

DistillSpec (Zhou et al. 2310.08461) trains a small LM on its own text too, since that is what it
continues when it drafts.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data.batch import Batch
from drafters.base import Sampling, TrainedDrafter

OWN_LAW = Sampling(temperature=1.0, draft_sampled=True)


@torch.no_grad()
def with_own_answers(
    batch: Batch, drafter: TrainedDrafter, share: float, eos_ids: list[int], pad_id: int
) -> Batch:
    """The batch with the answers of some rows, at random, written by the drafter at temperature 1.

    What a row holds before its first supervised token is the prompt. The new answer ends with an
    end token or where the row ended; only it is supervised. All choices follow from `batch.seed`.

    Args:
        batch: on the drafter's device, without target states, which depend on the tokens.
        drafter: one that reads tokens alone.
        share: of the rows, in expectation.
    """
    assert batch.aux_BSF is None and not drafter.aux_layers
    generator = torch.Generator().manual_seed(batch.seed)
    chosen_B = torch.rand(len(batch.row_ids), generator=generator) < share
    starts_B = batch.mask_BS.int().argmax(1)
    rows = [b for b in chosen_B.nonzero()[:, 0].tolist() if starts_B[b] > 0]
    if not rows:
        return batch
    starts, ends = starts_B[rows].tolist(), batch.lengths_B[rows].tolist()
    prompts = [batch.ids_BS[b, :start].tolist() for b, start in zip(rows, starts, strict=True)]
    room = [end - start for start, end in zip(starts, ends, strict=True)]
    answers = _continue(drafter, prompts, room, eos_ids, generator, batch.ids_BS.device)
    ids_BS, mask_BS = batch.ids_BS.clone(), batch.mask_BS.clone()
    lengths_B = batch.lengths_B.clone()
    for b, start, answer in zip(rows, starts, answers, strict=True):
        end = start + len(answer)
        ids_BS[b, start:], mask_BS[b] = pad_id, False
        ids_BS[b, start:end] = torch.tensor(answer, device=ids_BS.device)
        mask_BS[b, start:end] = True
        lengths_B[b] = end
    return replace(batch, ids_BS=ids_BS, mask_BS=mask_BS, lengths_B=lengths_B)


def _continue(
    drafter: TrainedDrafter,
    prompts: list[list[int]],
    room: list[int],
    eos_ids: list[int],
    generator: torch.Generator,
    device: torch.device,
) -> list[list[int]]:
    """Continuations of at most `room` tokens, drawn one by one from the drafter's own law."""
    R = len(prompts)
    state = drafter.start(prompts, max(len(p) + n for p, n in zip(prompts, room, strict=True)))

    def observe(next_ids_RN: Tensor, num: list[int]) -> None:
        nothing_RN0 = torch.zeros(*next_ids_RN.shape, 0, device=device)
        drafter.observe(state, next_ids_RN, nothing_RN0, torch.tensor(num, device=device))

    behind_RN = pad_sequence([torch.tensor(p[1:], dtype=torch.int64) for p in prompts], True)
    observe(behind_RN.to(device), [len(p) - 1 for p in prompts])
    answers: list[list[int]] = [[] for _ in prompts]
    going = [True] * R
    while any(going):
        uniforms_R1 = torch.rand(R, 1, generator=generator).to(device)
        tokens_R1 = drafter.propose(state, 1, OWN_LAW, uniforms_R1).tokens_BK
        observed = [int(on) for on in going]
        for r, token in enumerate(tokens_R1[:, 0].tolist()):
            if going[r]:
                answers[r].append(token)
                going[r] = token not in eos_ids and len(answers[r]) < room[r]
        if any(going):
            observe(tokens_R1, observed)
    return answers
