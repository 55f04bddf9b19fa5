// The options of FastAPI's own page, and the key where the server asks for one. In a file, as the page's policy forbids
// scripts within it.
"use strict";

async function start() {
  const asked = await fetch("openapi.json");
  const key = asked.status === 401 ? window.prompt("The key of this server:") : null;
  SwaggerUIBundle({
    url: "openapi.json",
    dom_id: "#swagger-ui",
    layout: "BaseLayout",
    deepLinking: true,
    showExtensions: true,
    showCommonExtensions: true,
    validatorUrl: null,
    requestInterceptor: (request) => {
      if (key) {
        request.headers.Authorization = `Bearer ${key}`;
      }
      return request;
    },
  });
}

start();
