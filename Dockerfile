# The environment of requirements.lock (x86-64, torch's CPU build) with demix; docs/how-to/slurm.md says how to run it.
FROM python:3.11-slim-bookworm
WORKDIR /opt/demix
COPY requirements.lock .
RUN pip install --no-cache-dir --require-hashes --no-deps -r requirements.lock \
    --extra-index-url https://download.pytorch.org/whl/cpu
COPY . .
RUN pip install --no-cache-dir --no-deps -e .
# For a user whom the image does not know: where caches go, and a name.
ENV HOME=/tmp USER=demix
WORKDIR /work
