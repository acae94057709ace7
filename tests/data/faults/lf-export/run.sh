#!/bin/bash
llamafactory-cli export merge.yaml
