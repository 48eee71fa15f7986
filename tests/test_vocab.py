import math

import pytest
import torch

from data.vocab import (
    build_draft_vocab,
    cache_key,
    check_map,
    corpus_hash,
    full_vocab,
    load_vocab,
    save_vocab,
    tokenizer_hash,
)
from recipes.errors import UserError
from tests.chat_tokenizers import CHATML, QWEN3, chat_tokenizer


def counts_of(vocab_size: int, **counts: int) -> torch.Tensor:
    """counts_of(10, t2=5): id 2 was seen five times."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for name, count in counts.items():
        counts_V[int(name[1:])] = count
    return counts_V


def test_p24_d2t_holds_offsets():
    vocab = build_draft_vocab(counts_of(10, t2=4, t3=9, t5=1, t9=2), 4, [])
    assert vocab.ids_D.tolist() == [2, 3, 5, 9]
    assert vocab.d2t.tolist() == [2, 2, 3, 6]
    assert vocab.d2t.dtype == torch.int64
    assert vocab.t2d.dtype == torch.bool
    assert vocab.t2d.tolist() == [i in (2, 3, 5, 9) for i in range(10)]
    assert 3 + int(vocab.d2t[3]) == 9
    assert vocab.draft_ids_V.tolist() == [-1, -1, 0, 1, -1, 2, -1, -1, -1, 3]
    assert vocab.draft_ids_V[vocab.ids_D].tolist() == [0, 1, 2, 3]  # there and back
    again = check_map(vocab.d2t, vocab.t2d, 4, 10)
    assert again.ids_D.tolist() == [2, 3, 5, 9]


def test_p25_fewer_seen_tokens_than_the_draft_vocabulary():
    counts_V = torch.zeros(200, dtype=torch.int64)
    counts_V[100:150] = 7  # 50 seen ids
    ids = build_draft_vocab(counts_V, 64, [199]).ids_D.tolist()
    assert ids == [*range(13), *range(100, 150), 199]  # 50 seen, the stop token, 13 unseen
    assert build_draft_vocab(counts_V, 200, [199]).is_identity
    assert build_draft_vocab(counts_V, None, [199]).is_identity
    with pytest.raises(UserError, match=r"300.*200"):
        build_draft_vocab(counts_V, 300, [199])


def test_ties_go_to_the_lower_id_and_special_ids_come_first():
    counts_V = counts_of(8, t1=5, t3=2, t4=2, t6=2)
    assert build_draft_vocab(counts_V, 3, []).ids_D.tolist() == [1, 3, 4]
    assert build_draft_vocab(counts_V, 3, [7, 0, 7]).ids_D.tolist() == [0, 1, 7]
    with pytest.raises(UserError, match="no room beside the 2"):
        build_draft_vocab(counts_V, 1, [7, 0])
    with pytest.raises(UserError, match="1 has no room beside the 1 end-of-sequence ids"):
        build_draft_vocab(counts_V, 1, [7])  # it would have nothing to choose from
    with pytest.raises(UserError, match="special id 8 "):
        build_draft_vocab(counts_V, 3, [8])
    with pytest.raises(UserError, match="draft_vocab_size 0 "):
        build_draft_vocab(counts_V, 0, [])


def test_coverage_is_the_share_of_counted_tokens():
    counts_V = counts_of(8, t1=5, t3=3, t4=2)
    assert build_draft_vocab(counts_V, 2, []).coverage(counts_V) == 0.8
    assert full_vocab(8).coverage(counts_V) == 1.0
    assert math.isnan(full_vocab(8).coverage(torch.zeros(8, dtype=torch.int64)))


def test_p26_stored_map_is_used_under_its_own_key_only(tmp_path):
    counts_V = counts_of(300, t5=3, t7=1)
    tokenizer = chat_tokenizer(CHATML)
    path = tmp_path / "vocab.json"

    def key(size=64, counts=counts_V, of=tokenizer):
        return cache_key(corpus_hash(counts), size, tokenizer_hash(of), [2])

    assert load_vocab(path, key()) is None
    save_vocab(path, build_draft_vocab(counts_V, 64, [2]), key())
    stored = load_vocab(path, key())
    assert stored is not None and stored.size == 64 and stored.vocab_size == 300
    assert load_vocab(path, key(size=128)) is None
    assert load_vocab(path, key(size=None)) is None
    assert load_vocab(path, key(counts=counts_of(300, t5=3, t8=1))) is None
    assert load_vocab(path, key(of=chat_tokenizer(QWEN3))) is None
    assert load_vocab(path, key(of=chat_tokenizer(CHATML, merges=False))) is None
    tokenizer.pad_token = "<|im_end|>"
    tokenizer(["a", "bb"], padding="max_length", max_length=4, truncation=True)
    assert load_vocab(path, key()) is not None


def test_p31_no_map_is_the_identity_for_the_full_vocabulary():
    assert check_map(None, None, 6, 6).ids_D.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(UserError, match=r"no d2t and t2d.*4.*6"):
        check_map(None, None, 4, 6)


def test_p31_half_a_map_or_one_of_the_wrong_length():
    vocab = build_draft_vocab(counts_of(6, t1=1, t4=1), 2, [])
    with pytest.raises(UserError, match="d2t without t2d"):
        check_map(vocab.d2t, None, 2, 6)
    with pytest.raises(UserError, match="t2d without d2t"):
        check_map(None, vocab.t2d, 2, 6)
    with pytest.raises(UserError, match=r"d2t has shape \[2\].*\[3\]"):
        check_map(vocab.d2t, vocab.t2d, 3, 6)
    with pytest.raises(UserError, match=r"t2d has shape \[6\].*\[7\]"):
        check_map(vocab.d2t, vocab.t2d, 2, 7)


def test_p31_maps_that_disagree_or_hold_absolute_ids():
    vocab = build_draft_vocab(counts_of(6, t1=1, t4=1), 2, [])
    with pytest.raises(UserError, match="different tokens"):
        check_map(vocab.d2t, vocab.t2d.roll(1), 2, 6)
    absolute = torch.tensor([2, 5])
    with pytest.raises(UserError, match="absolute ids"):
        check_map(absolute, torch.zeros(6, dtype=torch.bool), 2, 6)
