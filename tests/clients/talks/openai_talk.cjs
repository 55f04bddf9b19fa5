// A tool loop of the npm package openai; it knows of rollouts by its base URL.
const OpenAI = require("openai").default;

const [baseURL, rolloutId, prompt] = process.argv.slice(2);
const run = { add: (a, b) => a + b, subtract: (a, b) => a - b, multiply: (a, b) => a * b, divide: (a, b) => Math.floor(a / b) };
const number = { type: "number" };
const parameters = { type: "object", properties: { a: number, b: number }, required: ["a", "b"] };
const tools = Object.keys(run).map((name) => ({ type: "function", function: { name, description: name, parameters } }));
const gateway = baseURL.replace(/\/v1$/, "");
const client = new OpenAI({ baseURL: `${gateway}/rollouts/${rolloutId}/v1`, apiKey: "none", maxRetries: 0, timeout: 60000 });

(async () => {
  const messages = [{ role: "user", content: prompt }];
  for (let turn = 0; turn < 4; turn++) {
    const asked = { model: "policy", messages, tools, temperature: 0, max_tokens: 40 };
    const answer = turn % 2
      ? await client.chat.completions.stream(asked).finalChatCompletion()
      : await client.chat.completions.create(asked);
    const message = answer.choices[0].message;
    messages.push(message);
    if (!message.tool_calls || !message.tool_calls.length) break;
    for (const call of message.tool_calls) {
      const { a, b } = JSON.parse(call.function.arguments);
      messages.push({ role: "tool", tool_call_id: call.id, content: String(run[call.function.name](a, b)) });
    }
  }
  console.log(JSON.stringify({ answer: messages[messages.length - 1].content }));
})();
