// The openai client and the Vercel AI SDK on Node. Prints one JSON object a check: {name, error}.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert/strict";
import OpenAI from "openai";
import { z } from "zod";

const baseURL = `${process.env.BATON_SCRIPTED_URL}/v1`;
const model = "scripted";
const question = "What is (2 + 3) * 4?";
const numbers = z.object({ a: z.number(), b: z.number() });
const does = { add: ({ a, b }) => a + b, multiply: ({ a, b }) => a * b };

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const provider = createOpenAI({ baseURL, apiKey: "none" });
const sdkTools = Object.fromEntries(
  Object.entries(does).map(([name, execute]) => [name, tool({ description: name, inputSchema: numbers, execute })]),
);

const checks = {
  async openai_run_tools() {
    const called = [];
    const tools = Object.entries(does).map(([name, run]) => ({
      type: "function",
      function: {
        name,
        description: name,
        parse: JSON.parse,
        parameters: { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } },
        function: (args) => (called.push(name), String(run(args))),
      },
    }));
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({ model, messages: [{ role: "user", content: question }], tools, stream });
      assert.equal(await runner.finalContent(), "It is 20.");
    }
    assert.deepEqual(called, ["add", "multiply", "add", "multiply"]);
  },

  async openai_responses() {
    const parameters = { type: "object", properties: { a: { type: "number" }, b: { type: "number" } } };
    const tools = Object.keys(does).map((name) => ({ type: "function", name, parameters, strict: false }));
    const input = [{ role: "user", content: question }];
    for (;;) {
      const stream = client.responses.stream({ model, input, tools });
      const answer = await stream.finalResponse();
      const calls = answer.output.filter((item) => item.type === "function_call");
      if (!calls.length) {
        assert.equal(answer.output_text, "It is 20.");
        return;
      }
      input.push(...answer.output);
      for (const call of calls) {
        const output = String(does[call.name](JSON.parse(call.arguments)));
        input.push({ type: "function_call_output", call_id: call.call_id, output });
      }
    }
  },

  async ai_sdk_stream_text_over_responses() {
    const result = streamText({
      model: provider(model),
      prompt: question,
      tools: sdkTools,
      stopWhen: stepCountIs(5),
      providerOptions: { openai: { store: false } },
    });
    let text = "";
    for await (const piece of result.textStream) text += piece;
    assert.ok(text.endsWith("It is 20."));
    assert.equal((await result.steps).length, 3);
  },

  async ai_sdk_generate_text_over_chat() {
    const result = await generateText({
      model: provider.chat(model),
      prompt: question,
      tools: sdkTools,
      stopWhen: stepCountIs(5),
    });
    assert.equal(result.text, "It is 20.");
    assert.deepEqual(result.steps.slice(0, 2).map((step) => step.toolResults[0].output), [5, 20]);
  },
};

for (const [name, run] of Object.entries(checks)) {
  let error = null;
  try {
    await run();
  } catch (failure) {
    error = String(failure?.stack ?? failure);
  }
  console.log(JSON.stringify({ name, error }));
}
