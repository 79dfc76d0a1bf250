"""Text to vectors by calls of tokenizer, encoder and pooling, concurrently for the requests of a batch."""

import asyncio

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return await asyncio.gather(*[self.answer(request) for request in requests])

    async def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "TEXT")
        tokens = await self.ask(request, "tokenizer", [text], ["input_ids", "attention_mask"])
        if tokens.has_error():
            return pb_utils.InferenceResponse(error=tokens.error())
        encoded = await self.ask(request, "encoder", tokens.output_tensors(), ["token_embeddings"])
        if encoded.has_error():
            return pb_utils.InferenceResponse(error=encoded.error())
        mask = pb_utils.get_output_tensor_by_name(tokens, "attention_mask")
        pooled = await self.ask(request, "pooling", [*encoded.output_tensors(), mask], ["EMBEDDING"])
        if pooled.has_error():
            return pb_utils.InferenceResponse(error=pooled.error())
        return pb_utils.InferenceResponse(pooled.output_tensors())

    async def ask(self, request, model, inputs, outputs):
        inner = pb_utils.InferenceRequest(
            model_name=model, inputs=inputs, requested_output_names=outputs, request_id=request.request_id()
        )
        return await inner.async_exec()
