// Search of a site that is opened from a disk: browsers refuse workers there, so what a worker would run is run in a hidden
// frame. Material for MkDocs would load this from elsewhere.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      const run = address => new Promise((done, failed) => {
        const script = inside.document.createElement("script")
        script.src = address
        script.onload = done
        script.onerror = () => failed(new Error(`${address} cannot be read`))
        inside.document.body.appendChild(script)
      })
      inside.document.open()
      inside.document.write("<!DOCTYPE html><body></body>")
      inside.document.close()
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      inside.importScripts = (...addresses) => addresses.reduce((before, next) => before.then(() => run(next)), Promise.resolve())
      this.ready = run(url)
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
}
