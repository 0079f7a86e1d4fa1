# Every kind of value, every type of tensor; control bytes and long texts.
cd "$FIXTURES/gguf" && sluice info every_type.gguf
