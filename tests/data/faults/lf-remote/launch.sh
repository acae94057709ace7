#!/bin/bash
HOSTS=(node0 node1 node2 node3)
for i in 0 1 2 3; do
  ssh ${HOSTS[$i]} "cd /shared/run && NNODES=4 NODE_RANK=$i MASTER_ADDR=node0 MASTER_PORT=29500 NPROC_PER_NODE=8 FORCE_TORCHRUN=1 llamafactory-cli train train.yaml > log.$i 2>&1" &
done
wait
