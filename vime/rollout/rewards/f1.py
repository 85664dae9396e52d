"""``--rm-type f1``: token F1 of the response against the label, as SQuAD and HotpotQA score short answers.

Rajpurkar et al. 2016, section 6.1: lower case, punctuation and the articles a, an, the removed, then
F1 = 2 P R / (P + R) over the bags of words. A label that is a list counts by its best entry. HotpotQA's rule: where
either side is yes, no or noanswer, only equality counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = {"yes", "no", "noanswer"}


def words(text: str) -> list[str]:
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def f1(response: str, label: Any) -> float:
    if isinstance(label, list | tuple):
        return max((f1(response, one) for one in label), default=0.0)
    given, right = words(response), words(str(label))
    if (" ".join(given) in _CLOSED or " ".join(right) in _CLOSED) and given != right:
        return 0.0
    common = sum((Counter(given) & Counter(right)).values())
    if common == 0:
        return float(given == right)  # both empty
    precision, recall = common / len(given), common / len(right)
    return 2 * precision * recall / (precision + recall)
