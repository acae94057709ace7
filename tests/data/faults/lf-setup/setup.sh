#!/bin/bash
set -e
conda create -y -n train python=3.11
source activate train
pip install llamafactory==0.9.5 "deepspeed>=0.10.0,<=0.18.9"
llamafactory-cli train train.yaml
