#!/bin/bash
# on the first machine; the second runs it with --machine_rank 1
accelerate launch --config_file fsdp.yaml src/train.py train.yaml
