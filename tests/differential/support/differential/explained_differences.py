"""Known differences from vLLM 0.32, by the name of the request: why each exists. The page lists the same ones."""

from __future__ import annotations

N_GREEDY = "vLLM rejects n above 1 with temperature 0; Trimtab returns equal choices"
NO_TOOLS = "the model's chat template ignores tools; vLLM drops them silently, Trimtab rejects the request"
GRAMMAR_END = "vLLM counts the end token of a grammar as an output token; Trimtab ends without it"
FORCED_TEXT = (
    "Trimtab writes text that the grammar forces in the tokenizer's own tokens ('colour'), vLLM as sampled "
    "('c', 'ol', 'our'); the two likeliest values are within 0.25 of each other, so another one wins"
)
ECHO_LOGPROBS = "vLLM repeats the prompt's log-probabilities in choices.prompt_logprobs; Trimtab only in logprobs"

EXPLAINED: dict[str, str] = {
    "completion-echo-logprobs": ECHO_LOGPROBS,
    "completion-echo-no-tokens": f"{ECHO_LOGPROBS}. vLLM computes one token and counts it; Trimtab computes none",
    "completion-stream-echo": "vLLM adds prompt_token_ids to a streamed echo; Trimtab needs return_token_ids for them",
    "completion-n": N_GREEDY,
    "completion-n-logprobs": N_GREEDY,
    "chat-n": N_GREEDY,
    "chat-stream-n": N_GREEDY,
    "completion-no-special-tokens": "Trimtab supports spaces_between_special_tokens only as true",
    "completion-structured-choice": GRAMMAR_END,
    "completion-structured-regex": GRAMMAR_END,
    "chat-structured-grammar": GRAMMAR_END,
    "chat-json-schema": FORCED_TEXT,
    "chat-structured-json": FORCED_TEXT,
    "chat-echo": "Trimtab has no echo for chat",
    "chat-tool-auto": NO_TOOLS,
    "chat-tool-none": NO_TOOLS,
    "chat-tool-required": NO_TOOLS,
    "chat-tool-named": NO_TOOLS,
    "chat-tool-history": NO_TOOLS,
    "chat-stream-tool-named": NO_TOOLS,
    "embeddings-generative": "Trimtab computes embeddings of generative models; vLLM needs --runner pooling",
    "error-role": "vLLM passes any role to the chat template; Trimtab accepts the roles of the OpenAI API",
}
