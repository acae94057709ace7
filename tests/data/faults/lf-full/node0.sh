#!/bin/bash
set -e
export NCCL_DEBUG=WARN
export NCCL_SOCKET_IFNAME=eth0
export NCCL_IB_HCA=mlx5
export FORCE_TORCHRUN=1
export NNODES=2
export NODE_RANK=0
export NPROC_PER_NODE=8
export MASTER_ADDR=10.20.0.11
export MASTER_PORT=29500
llamafactory-cli train train.yaml
