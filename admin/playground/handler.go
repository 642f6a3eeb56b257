package playground

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"fmt"
	"io/fs"
	"mime"
	"net/http"
	"path"
	"time"

	"github.com/pgratelimit/pgratelimit/middleware/httplimit/client"
)

//go:embed web
var web embed.FS

const index = "index.html"

// policy is what the page may do: use its own files, and nothing else.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'self'"

// read returns the files of the page by name, with the module that decides.
func read() map[string][]byte {
	files := map[string][]byte{"ratelimit.js": client.Module()}
	err := fs.WalkDir(web, "web", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		files[path.Base(name)], err = web.ReadFile(name)
		return err
	})
	if err != nil {
		panic(fmt.Sprintf("playground: the embedded files cannot be read: %v", err)) // the build was wrong
	}
	return files
}

// file is a file of the page, ready to send.
type file struct {
	text        []byte
	contentType string
	tag         string
}

// Handler serves the page and its files to GET and HEAD, below any prefix: the last element of the path is the name of
// the file, and an empty one is the page. Browsers revalidate their copies at each visit.
func Handler() http.Handler {
	files := make(map[string]file)
	for name, text := range read() {
		sum := sha256.Sum256(text)
		files[name] = file{
			text:        text,
			contentType: contentType(name),
			tag:         `"` + base64.RawURLEncoding.EncodeToString(sum[:]) + `"`,
		}
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		header := w.Header()
		header.Set("X-Content-Type-Options", "nosniff")
		header.Set("Content-Security-Policy", policy)
		header.Set("Referrer-Policy", "no-referrer")
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			header.Set("Allow", "GET, HEAD")
			http.Error(w, http.StatusText(http.StatusMethodNotAllowed), http.StatusMethodNotAllowed)
			return
		}
		_, name := path.Split(r.URL.Path)
		if name == "" {
			name = index
		}
		f, found := files[name]
		if !found {
			http.NotFound(w, r)
			return
		}
		header.Set("Content-Type", f.contentType)
		header.Set("Cache-Control", "no-cache")
		header.Set("ETag", f.tag)
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(f.text))
	})
}

// contentType does not ask the machine, whose tables may say anything.
func contentType(name string) string {
	kind := map[string]string{".html": "text/html", ".css": "text/css", ".js": "text/javascript"}[path.Ext(name)]
	return mime.FormatMediaType(kind, map[string]string{"charset": "utf-8"})
}
