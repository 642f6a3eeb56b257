package playground_test

import (
	_ "embed"
	"flag"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

//go:embed testdata/pictures.js
var pictures string

var update = flag.Bool("update", false, "write the pictures of docs/images that the page draws")

// picture is a file of docs/images, and the figures in it.
type picture struct {
	Text string `json:"text"`
	Told string `json:"told"`
}

// TestPicturesAreUpToDate draws the picture of each kind of limit in docs/images, with the code of the page, and compares it with
// the stored picture. With -update it writes them.
func TestPicturesAreUpToDate(t *testing.T) {
	t.Parallel()
	p := open(t, serve(t))
	style, err := os.ReadFile("../../../admin/playground/web/style.css")
	require.NoError(t, err)
	drawn := play[map[string]picture](t, p, "const style = "+strconv.Quote(string(style))+";\n"+pictures)
	require.Len(t, drawn, 6)
	recipes, err := os.ReadFile("../../../docs/recipes.md")
	require.NoError(t, err)
	for name, picture := range drawn {
		path := filepath.Join("..", "..", "..", "docs", "images", name)
		if *update {
			require.NoError(t, os.WriteFile(path, []byte(picture.Text), 0o644))
		}
		file, err := os.ReadFile(path)
		require.NoError(t, err, "go test ./integration_test/browser/playground -run Pictures -update")
		require.Equal(t, picture.Text, string(file), "%s: go test ./integration_test/browser/playground -run Pictures -update", name)
		require.Less(t, len(file), 20_000, name)
		require.Contains(t, string(recipes), "(images/"+name+")")
	}
}
