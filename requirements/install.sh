#!/usr/bin/env bash
# Creates the virtual environment for a machine without a GPU and installs vime into it; does nothing where that is done.
#
#   requirements/install.sh [DIRECTORY]     default .venv; PYTHON=python3.12 picks the interpreter
#
# Two commands, because the CPU build of vLLM asks for 3 GB that it does not import (requirements/cpu.txt).
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' >/dev/null 2>&1; }
if [ -n "${PYTHON:-}" ]; then
    usable "$PYTHON" || { echo "PYTHON=$PYTHON: vime needs Python 3.11 or 3.12 with the venv module" >&2; exit 1; }
else
    for candidate in python3.11 python3.12 python3 python; do
        if usable "$candidate"; then PYTHON=$candidate; break; fi
    done
    [ -n "${PYTHON:-}" ] || { echo "Neither python3.11 nor python3.12 (with the venv module) is on PATH; PYTHON=... names one" >&2; exit 1; }
fi

# Installed already? The stamp holds everything that decides what is installed, and where: an editable install knows its path.
want=$( { "$PYTHON" -V; pwd; cat requirements/* pyproject.toml; } | sha256sum | cut -d' ' -f1)
stamp=$venv/vime-installed
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && "$venv/bin/python" -c pass 2>/dev/null; then
    exit 0
fi

start=$SECONDS
echo "Installing into $venv ($("$PYTHON" -V)); once, a minute or two."
rm -f "$stamp"
clear=
if [ ! -x "$venv/bin/python" ] || [ "$("$venv/bin/python" -V 2>&1)" != "$("$PYTHON" -V)" ]; then clear=--clear; fi
"$PYTHON" -m venv $clear "$venv"
pip() {
    # One quiet line per command; pip's own output only where it fails.
    echo "  pip $*"
    "$venv/bin/python" -m pip --disable-pip-version-check "$@" >"$venv/pip.log" 2>&1 || { cat "$venv/pip.log" >&2; exit 1; }
}
pip install --upgrade -c requirements/constraints.txt pip
pip install -c requirements/constraints.txt -r requirements/cpu.txt
pip install --no-deps -r requirements/cpu-nodeps.txt
pip install -c requirements/constraints.txt --no-build-isolation -e ".[cpu,dev]"

# transformers imports torchvision where it is, and PyPI's build of it does not load beside a CPU torch.
if "$venv/bin/python" -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("torchvision"))'; then
    pip uninstall -y torchvision
fi
echo "$want" >"$stamp"
echo "Installed in $((SECONDS - start)) s, $(du -sh "$venv" | cut -f1)."
