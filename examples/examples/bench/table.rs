//! Tables that read well in a terminal and are Markdown.

/// Columns as wide as their widest cell, the first aligned left and the others right; those without
/// a single value are left out.
///
/// A row with text in the first cell only is a remark, which may be wider than the column.
pub fn markdown(headers: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table: Vec<Vec<String>> = vec![headers.iter().map(|&it| it.to_owned()).collect()];
    table.extend(
        rows.into_iter()
            .map(|row| row.iter().map(|text| cell(text)).collect()),
    );
    let has_value = |column: usize| table[1..].iter().any(|row| !row[column].is_empty());
    let kept: Vec<usize> = (0..headers.len())
        .filter(|&column| column == 0 || has_value(column))
        .collect();
    let is_remark = |row: &[String]| row.len() > 1 && row[1..].iter().all(String::is_empty);
    let in_line: Vec<&[String]> = table
        .iter()
        .map(Vec::as_slice)
        .filter(|row| !is_remark(row))
        .collect();
    let width = |column: usize| {
        let lengths = in_line.iter().map(|row| row[column].chars().count());
        lengths.max().unwrap_or(0)
    };
    let widths: Vec<usize> = kept.iter().map(|&column| width(column)).collect();

    let mut text = String::new();
    for (index, row) in table.iter().enumerate() {
        text += &format!("| {:<1$} |", row[0], widths[0]);
        for (&column, width) in kept.iter().zip(&widths).skip(1) {
            text += &format!(" {:>width$} |", row[column]);
        }
        text.push('\n');
        if index == 0 {
            text += &format!("|{}|", "-".repeat(widths[0] + 2));
            for width in &widths[1..] {
                text += &format!("{}:|", "-".repeat(width + 1));
            }
            text.push('\n');
        }
    }
    text
}

/// Escapes characters that would end a cell or a row.
fn cell(text: &str) -> String {
    text.replace('|', "\\|").replace(['\n', '\r'], " ")
}

/// A number of bytes to read.
pub fn mebibytes(bytes: u64) -> String {
    let mebibytes = bytes as f64 / f64::from(1 << 20);
    let decimals = if mebibytes < 100.0 { 1 } else { 0 };
    format!("{mebibytes:.decimals$} MiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(cells: [&str; 2]) -> Vec<String> {
        cells.map(String::from).to_vec()
    }

    #[test]
    fn columns_are_as_wide_as_their_cells() {
        let rows = [
            row(["bare", "12.5"]),
            row(["a remark | of\ntwo lines", ""]),
            row(["off", "7"]),
        ];
        assert_eq!(
            markdown(&["setting", "ms"], rows),
            "| setting |   ms |\n\
             |---------|-----:|\n\
             | bare    | 12.5 |\n\
             | a remark \\| of two lines |      |\n\
             | off     |    7 |\n"
        );
    }

    #[test]
    fn a_column_without_a_value_is_left_out() {
        let rows = [["bare", "", "1"], ["off", "", ""]].map(|row| row.map(String::from).to_vec());
        assert_eq!(
            markdown(&["setting", "ms", "skipped"], rows),
            "| setting | skipped |\n\
             |---------|--------:|\n\
             | bare    |       1 |\n\
             | off     |         |\n"
        );
    }

    #[test]
    fn bytes_are_shown_in_mebibytes() {
        assert_eq!(mebibytes(3 << 19), "1.5 MiB");
        assert_eq!(mebibytes(1 << 31), "2048 MiB");
    }
}
