/* Search in pages that are opened as files: browsers start no worker there, so a hidden frame takes its place. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = "<!DOCTYPE html><body></body>";
      this.ready = new Promise(done => {
        frame.onload = () => {
          const inner = frame.contentWindow, script = inner.document.createElement("script");
          inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
          script.onload = () => done(inner);
          script.src = url;
          inner.document.body.append(script);
        };
      });
      document.body.append(frame);
    }
    postMessage(data) {
      this.ready.then(inner => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
    }
  };
}
