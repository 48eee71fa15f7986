"""The marks that thinking stands between, in the ways that published chat templates write it.

<think> (Qwen3, DeepSeek, GLM, SmolLM3), its kin with a prefix or suffix (<seed:think>), [THINK]
(Magistral), <|channel>thought (Gemma 4), <|START_THINKING|> (Command), and gpt-oss's analysis
channel.
"""

import re

_OPEN = r"(?:<(?:\w+:)?think(?::\w+)?>|\[THINK\]|<\|channel>thought|<\|START_THINKING\|>)"
_CLOSE = r"(?:</(?:\w+:)?think(?::\w+)?>|\[/THINK\]|<channel\|>|<\|END_THINKING\|>)"
CLOSE = re.compile(_CLOSE)
EMPTY = re.compile(rf"\s*(?:{_OPEN})?\s*{_CLOSE}\s*")
"""A think block with nothing in it: put in by the template, written by nobody."""
OPENER = re.compile(rf"(?:{_OPEN}\s*(?:{_CLOSE}\s*)?|{_CLOSE}\s*)\Z")
"""What a generation prompt ends with that starts, or skips, the thinking."""
FILLER = re.compile(rf"\s*(?:(?:{_OPEN})?\s*{_CLOSE}\s*)?")
THOUGHT = re.compile(
    rf"\s*(?:{_OPEN})?(?:(?!{_CLOSE}).)*{_CLOSE}\s*"
    r"|<\|channel\|>analysis<\|message\|>.*?<\|end\|>(?:<\|start\|>assistant)?",
    re.DOTALL,
)
"""The thinking at the start of an answer, with the marks around it."""
