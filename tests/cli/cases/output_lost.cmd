# A full disk is an error, not silence.
sluice info "$FIXTURES/gguf/shapes.gguf" >/dev/full
