# Sourced by tools/quickstart and tools/test, in the repository's folder: finds Python, makes
# .venv, and knows what was installed there.
#
# A stamp holds what an environment was installed from, so that an unchanged one costs nothing.
# shellcheck shell=bash
VENV=.venv
LOCK=requirements-dev.lock
TEST_STAMP=$VENV/.installed        # left by tools/test: everything in the lock
SERVICE_STAMP=$VENV/.quickstart    # left by tools/quickstart: what the service needs
# A line of a path file: setuptools' default, an import hook, takes as long as Python's own start.
EDITABLE=(--editable '.[server]' --config-settings editable_mode=compat)

fail() {
    printf '%s\n' "tools/${0##*/}: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        [[ -n $candidate ]] && command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or later found; install it, or name it: PYTHON=/path/to/python3.11"
}

# Leaves a .venv that works as it is.
make_venv() {
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    local python
    python=$(find_python) || exit 1
    "$python" -c 'import ensurepip, venv' 2>/dev/null || fail \
        "$python cannot make a virtual environment (no ensurepip); on Debian: apt-get install" \
        "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    "$python" -m venv --clear "$VENV" || fail "$python could not make $VENV"
}

pip_install() {
    "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

# What an environment installed now would be made from.
environment_source() {
    cat "$LOCK" pyproject.toml | cksum
    pwd
}

# Whether one of these stamps says that .venv is up to date.
is_installed() {
    local stamp
    for stamp in "$@"; do
        [[ -x $VENV/bin/python && -f $stamp && $(<"$stamp") == "$(environment_source)" ]] && return
    done
    return 1
}
