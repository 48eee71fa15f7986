"""What SGLang reads otherwise than vLLM, from the folder of an EAGLE-3 or a DFlash.

Read in sgl-project/sglang (python/sglang/srt: models/llama_eagle3.py, models/dflash.py,
speculative/dflash_utils.py, model_executor/model_runner.py) and sgl-project/SpecForge
(specforge/modeling/draft, configs/); never run here.

- The one layer of an EAGLE-3 is `midlayer.*`. Tensors of other names are skipped without a word, so
  a folder with `layers.0.*` would draft with random weights.
- `eagle_config.eagle_aux_hidden_state_layer_ids` are indices of decoder layers whose output is
  read: SGLang adds 1, so index k - 1 is our state k. Embeddings (k = 0) have no such index, and the
  state behind the last layer is never captured. The key of that name at the top, which vLLM
  prefers, counts like ours: with both, one folder serves in both engines.
- `norm_before_residual` and `norm_before_fc` are not read; `fc_norm` and `norm_output`
  (EAGLE-3.1) are, by versions that know them.
- Embeddings are always the target's; a head that is not tied is the folder's.
- DFlash: the plain form of z-lab, with `num_target_layers` (without it, layer ids are held against
  the number of the drafter's own layers); attention is not causal, the head is the target's.
- A chain of K drafted tokens is K steps, one branch each, and K + 1 tokens to be verified.
"""

from typing import Any

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
NUM_AUX = 3  # states that its fc reads


def layer_ids(aux_layers: list[int]) -> list[int]:
    """Our layer ids in SGLang's count."""
    return [k - 1 for k in aux_layers]


def counts_layers(config: dict[str, Any]) -> bool:
    """Whether a plain config.json holds ids in both counts, that is, is of SGLang's form."""
    eagle, ours = config.get("eagle_config"), config.get(LAYERS_KEY)
    theirs = eagle.get(LAYERS_KEY) if isinstance(eagle, dict) else None
    if not isinstance(ours, list) or not all(type(k) is int for k in ours) or not ours:
        return False
    return theirs == layer_ids(ours)


def renamed(tensors: dict[str, str]) -> dict[str, str]:
    """Of a table of names, those that differ: the first layer's."""
    start = "layers.{i}."
    return {
        ours: theirs.replace(start, "midlayer.")
        for ours, theirs in tensors.items()
        if ours.startswith(start)
    }


def faults(shape: Any, num_target_layers: int) -> list[str]:
    """Why SGLang would not serve an EAGLE-3 of this shape, or would serve another drafter."""
    found, aux = [], list(shape.aux_layers)
    if shape.num_layers != 1:
        found.append(f"drafter.num_layers {shape.num_layers}: it has one layer there")
    if len(aux) != NUM_AUX:
        found.append(f"aux layers {aux}: it reads {NUM_AUX}")
    if aux and (aux[0] < 1 or aux[-1] >= num_target_layers):
        found.append(f"aux layers {aux} must be within 1..{num_target_layers - 1}")
    found += [
        f"drafter.{switch} is not read"
        for switch, is_on in (
            ("norm_before_residual", shape.norm_before_residual),
            ("norm_before_fc", shape.norm_before_fc),
        )
        if is_on
    ]
    return found


def eagle3_options(_shape: Any, form: str, num_draft_tokens: int) -> list[str] | None:
    """See ExportForm.sglang; only its own form has the names that it reads."""
    if form != "sglang":
        return None
    return [
        *("--speculative-algorithm", "EAGLE3"),
        *("--speculative-num-steps", str(num_draft_tokens)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(num_draft_tokens + 1)),
    ]


def dflash_options(shape: Any, form: str, _num_draft_tokens: int) -> list[str] | None:
    """See ExportForm.sglang; a block says itself how many tokens it drafts."""
    if form != "vllm" or shape.draft_vocab_size != shape.vocab_size or shape.causal:
        return None
    return [
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-num-draft-tokens", str(shape.block_size)),
    ]
