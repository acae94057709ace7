#!/bin/bash
swift pt pt.yaml
