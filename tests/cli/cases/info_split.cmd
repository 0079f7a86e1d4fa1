cd "$FIXTURES/gguf" && sluice info split-00001-of-00003.gguf
