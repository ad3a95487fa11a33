"""Commands that several checks advise."""

BUILD_WHEEL = "python -m dsdoctor build-wheel"
USE_ENV = 'eval "$(python -m dsdoctor env)"'
ASSEMBLE = 'export CUDA_HOME="$(python -m dsdoctor toolkit)"'
