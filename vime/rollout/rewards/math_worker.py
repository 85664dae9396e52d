"""Child process that decides whether two mathematical answers are equal, by math-verify. One JSON line in, one out.

A process of its own, because sympy can take for ever, or all memory, over an answer such as 9^{9^{9^9}}: in a thread
it could not be stopped (math-verify's own time limit is a signal, which needs the main thread and waits for C code to
return). It ends itself by ``faulthandler``, whose timer needs no interpreter lock, so it also ends when its parent has
died in the meantime. Started as a script: it must not need vime to be importable.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import resource
import sys

MEMORY = 4 << 30  # bytes of address space


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify

    def expression(text: str) -> list:
        return parse(f"${text}$", parsing_timeout=None)  # type: ignore[arg-type]  # None: no time limit of its own

    # The protocol has the real stdout to itself; what a library prints goes nowhere.
    out = os.fdopen(os.dup(1), "w")
    nowhere = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    os.dup2(nowhere.fileno(), 1)
    # Of its own errors only those count that keep it from starting, such as a missing part of math-verify.
    if not verify(expression("0.5"), expression(r"\frac{1}{2}"), timeout_seconds=None):
        raise RuntimeError("math-verify does not find 0.5 equal to 1/2")
    os.dup2(nowhere.fileno(), 2)
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        gold, answer, seconds = json.loads(line)
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)
        try:
            equal = verify(expression(gold), expression(answer), timeout_seconds=None)
        except Exception:  # noqa: BLE001 - whatever an odd expression makes the parser do, RecursionError included
            equal = False
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(bool(equal)), file=out, flush=True)


if __name__ == "__main__":
    main()
