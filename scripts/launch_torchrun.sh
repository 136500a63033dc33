#!/usr/bin/env bash
# Starts one node's share of a run: a vLLM server on some of its GPUs, and trainers on the others. Run it on every node.
#
#   scripts/launch_torchrun.sh experiment=grpo_1node [key=value ...]
#
#   CHECKPOINT       what the server starts from, as model.path; unset: no server is started (rollout=transformers, or
#                    servers that run already)
#   NNODES           nodes of the run                                      1
#   NODE_RANK        this node's number, from 0                            0
#   MASTER_ADDR      node 0, as all nodes reach it                         127.0.0.1
#   MASTER_PORT      a free port there                                     29500
#   TRAIN_GPUS       GPUs that train, by number; empty: TRAINERS processes on the CPU   0,1,2,3
#   ROLLOUT_GPUS     GPUs of the server                                    4,5,6,7
#   TRAINERS         training processes, one a GPU                         as many as TRAIN_GPUS
#   PYTHON           python of the environment that trains                 python
#   LOG_DIR          where the server's log goes                           runs
#   and those of serve_vllm.sh
#
# To resume, give the same command line with ckpt_path=RUN_DIR/checkpoints/last.ckpt.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
train_gpus=${TRAIN_GPUS-0,1,2,3}
rollout_gpus=${ROLLOUT_GPUS-4,5,6,7}
node_rank=${NODE_RANK:-0}
if [[ -n $train_gpus ]]; then
    commas=${train_gpus//[^,]/}
    trainers=${TRAINERS:-$((${#commas} + 1))}
else
    trainers=${TRAINERS:?set TRAINERS, as TRAIN_GPUS is empty}
fi

server=
stop_server() {
    if [[ -n $server ]]; then
        kill "$server" 2>/dev/null || true
        wait "$server" 2>/dev/null || true
    fi
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ -n ${CHECKPOINT:-} ]]; then
    mkdir -p "${LOG_DIR:-runs}"
    log="${LOG_DIR:-runs}/vllm-node$node_rank.log"
    CUDA_VISIBLE_DEVICES=$rollout_gpus "$repository/scripts/serve_vllm.sh" "$CHECKPOINT" >"$log" 2>&1 &
    server=$!
    echo "vLLM starts on GPUs $rollout_gpus, log in $log"
fi

CUDA_VISIBLE_DEVICES=$train_gpus "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "${NNODES:-1}" \
    --node-rank "$node_rank" \
    --nproc-per-node "$trainers" \
    --master-addr "${MASTER_ADDR:-127.0.0.1}" \
    --master-port "${MASTER_PORT:-29500}" \
    "$repository/train.py" "trainer.devices=$trainers" "++trainer.num_nodes=${NNODES:-1}" "$@"
