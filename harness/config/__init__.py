"""Configuration: from words on the command line to a runnable method.

    schema.py           the frozen dataclasses that configure a run
    validation.py       plain values checked into those dataclasses
    load.py             Hydra, YAML and JSON to those dataclasses; run ids
    outside.py          version and source of other packages whose methods a run uses
    resolve.py          parts with their knobs, and every implied default filled in
    compose.py          parts folded into one method, plans merged, conflicts refused
    decoder_config.py   the shape of a decoder from the model's configuration

`conf/` holds the values: one folder per group, one YAML file per choice.
"""
