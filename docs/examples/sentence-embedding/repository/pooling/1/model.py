"""Mean of the token vectors of each text without padding, normalised to length one."""

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        tokens = pb_utils.get_input_tensor_by_name(request, "token_embeddings").as_numpy()
        mask = pb_utils.get_input_tensor_by_name(request, "attention_mask").as_numpy()
        weights = mask.astype(np.float32)[:, None, :]
        mean = (weights @ tokens)[:, 0, :] / np.maximum(weights.sum(axis=2), 1)
        vectors = mean / np.maximum(np.linalg.norm(mean, axis=1, keepdims=True), 1e-12)
        return pb_utils.InferenceResponse([pb_utils.Tensor("EMBEDDING", vectors)])
