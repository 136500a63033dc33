#!/usr/bin/env bash
# Starts one vLLM server as VLLMServerEngine needs it, in the foreground.
#
#   scripts/serve_vllm.sh CHECKPOINT [further vLLM flags]
#
#   VLLM_PYTHON      python of the environment that holds vLLM             python
#   VLLM_HOST        address to listen on; whoever reaches it can change the weights   127.0.0.1
#   VLLM_PORT        its port                                              8000
#   TENSOR_PARALLEL  GPUs of the server                                    4
#   GPU_MEMORY       share of their memory: 0.85 for 8B, 0.65 for 30B-A3B  0.85
#   MAX_SEQUENCES    rollouts at once                                      32
#   MAX_LENGTH       tokens of a trajectory, prompt and images included    81920
#   MAX_IMAGES       images of a trajectory                                64
set -euo pipefail

checkpoint=${1:?usage: scripts/serve_vllm.sh CHECKPOINT [further vLLM flags]}
shift
repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The endpoints that take weights are vLLM's development mode.
export VLLM_SERVER_DEV_MODE=1
export VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1
# The worker of this package is found without being installed beside vLLM.
export PYTHONPATH="$repository${PYTHONPATH:+:$PYTHONPATH}"

exec "${VLLM_PYTHON:-python}" -m vllm.entrypoints.openai.api_server \
    --model "$checkpoint" \
    --host "${VLLM_HOST:-127.0.0.1}" \
    --port "${VLLM_PORT:-8000}" \
    --tensor-parallel-size "${TENSOR_PARALLEL:-4}" \
    --gpu-memory-utilization "${GPU_MEMORY:-0.85}" \
    --max-num-seqs "${MAX_SEQUENCES:-32}" \
    --max-model-len "${MAX_LENGTH:-81920}" \
    --limit-mm-per-prompt "{\"image\": ${MAX_IMAGES:-64}, \"video\": 0}" \
    --enable-scale-out \
    --logprobs-mode processed_logprobs \
    --worker-extension-cls opensearch_lightning.vllm_worker.WeightFiles \
    "$@"
