"""Padding, batch plan and its division among ranks."""

import pytest
import torch

from data.batch import Row, States, collate, make_batch, plan_batches, shard

EOS = 9


def make_row(name, length, num_aux=None, dtype=torch.float32):
    ids_S = torch.arange(1, length + 1) % 8
    ids_S[-1] = EOS
    mask_S = torch.arange(length) >= length // 2
    states = None
    if num_aux is not None:
        states = States(
            aux_SF=torch.ones(length, 4 * num_aux, dtype=dtype),
            hidden_SH=torch.ones(length, 4, dtype=dtype),
            lse_S=torch.ones(length),
        )
    return Row(id=name, ids_S=ids_S, mask_S=mask_S, states=states)


def test_p17_real_eos_is_kept_where_pad_equals_eos():
    batch = collate([make_row("a", 5), make_row("b", 8)], pad_id=EOS)
    assert batch.ids_BS[0].tolist() == [1, 2, 3, 4, EOS, EOS, EOS, EOS]
    assert batch.mask_BS[0].tolist() == [False, False, True, True, True, False, False, False]
    assert batch.mask_BS[1].tolist() == [False] * 4 + [True] * 4
    assert batch.lengths_B.tolist() == [5, 8]
    assert batch.valid_BS.sum(1).tolist() == [5, 8]


def test_states_are_padded_with_zeros_and_keep_their_dtype():
    rows = [make_row("a", 3, num_aux=3, dtype=torch.bfloat16), make_row("b", 5, 3, torch.bfloat16)]
    batch = collate(rows)
    assert batch.aux_BSF.shape == (2, 5, 12)
    assert batch.hidden_BSH.shape == (2, 5, 4)
    assert batch.aux_BSF.dtype == batch.hidden_BSH.dtype == torch.bfloat16
    assert batch.lse_BS.dtype == torch.float32
    assert batch.lse_BS[0].tolist() == [1, 1, 1, 0, 0]
    assert batch.aux_BSF[0, 3:].abs().max() == 0
    assert batch.to("cpu").row_ids == ["a", "b"]


@pytest.mark.parametrize("num_aux", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_p71_stand_in_has_the_dtype_and_width_of_real_rows(num_aux, dtype):
    rows = [make_row("a", 40, num_aux, dtype), make_row("b", 6, num_aux, dtype)]
    real, empty = make_batch(rows, [0, 1]), make_batch(rows, [])
    for name in ("ids_BS", "mask_BS", "lengths_B", "aux_BSF", "hidden_BSH", "lse_BS"):
        a, b = getattr(real, name), getattr(empty, name)
        assert (a.dtype, a.ndim, a.shape[2:]) == (b.dtype, b.ndim, b.shape[2:]), name
    assert empty.ids_BS.shape == (1, 16)
    assert empty.mask_BS.sum() == 0
    assert make_batch([make_row("a", 40)], []).aux_BSF is None


def test_p71_all_ranks_get_the_same_number_of_batches():
    plan = [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert shard(plan, 0, 1) == plan
    assert shard(plan, 0, 2) == [[0, 1], [4, 5], [8]]
    assert shard(plan, 1, 2) == [[2, 3], [6, 7], []]
    assert [shard([[0]], rank, 3) for rank in range(3)] == [[[0]], [[]], [[]]]


def lengths_of(num_rows, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(5, 300, (num_rows,), generator=rng).tolist()


@pytest.mark.parametrize(("batch_tokens", "rows"), [(None, 4), (1024, 1), (None, 1), (10, 1)])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 1001])
def test_every_row_exactly_once(num_rows, batch_tokens, rows):
    lengths = lengths_of(num_rows)
    plan = plan_batches(lengths, batch_tokens, rows, seed=0, epoch=0)
    assert sorted(index for batch in plan for index in batch) == list(range(num_rows))
    assert all(plan)
    for batch in plan:
        if batch_tokens is None:
            assert len(batch) <= rows
        else:
            padded = len(batch) * max(lengths[index] for index in batch)
            assert padded <= batch_tokens or len(batch) == 1


def test_row_cap_leaves_one_partial_batch():
    plan = plan_batches(lengths_of(1001), None, 4, seed=0, epoch=0)
    assert sorted(len(batch) for batch in plan) == [1] + [4] * 250


def test_order_depends_on_seed_and_epoch_only():
    lengths = lengths_of(50)
    plan = plan_batches(lengths, None, 4, seed=3, epoch=1)
    assert plan == plan_batches(lengths, None, 4, seed=3, epoch=1)
    assert plan != plan_batches(lengths, None, 4, seed=3, epoch=2)
    assert plan != plan_batches(lengths, None, 4, seed=4, epoch=1)


def test_similar_lengths_share_a_batch():
    lengths = lengths_of(4000)

    def padding_share(plan):
        padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in plan)
        return 1 - sum(lengths) / padded

    in_order = [list(range(start, start + 8)) for start in range(0, 4000, 8)]
    assert padding_share(in_order) > 0.35
    assert padding_share(plan_batches(lengths, None, 8, seed=0, epoch=0)) < 0.03
    assert padding_share(plan_batches(lengths, 2048, 1, seed=0, epoch=0)) < 0.03


@pytest.mark.parametrize("world", [1, 2])
def test_p64_resumed_ids_join_to_the_uninterrupted_list(world):
    lengths = lengths_of(12)

    def ids(start, stop):
        """Row ids of steps [start, stop), all ranks, counted from the beginning of the run."""
        seen, num_steps = [], len(shard(plan_batches(lengths, None, 2, 0, 0), 0, world))
        for step in range(start, stop):
            epoch, index = divmod(step, num_steps)
            plan = plan_batches(lengths, None, 2, seed=0, epoch=epoch)
            seen += [shard(plan, rank, world)[index] for rank in range(world)]
        return seen

    a_run = 3 * 6 // world
    assert ids(0, a_run) == ids(0, 10 // world) + ids(10 // world, a_run)
    epochs = [ids(e * 6 // world, (e + 1) * 6 // world) for e in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == list(range(12))
