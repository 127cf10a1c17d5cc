//! `nowait top`: what a running server does, on a screen that is drawn anew each second.
//!
//! Invariant: the terminal is as it was when this ends, by a key, by a signal or by an error; a text
//! of a client reaches it without control characters.

use std::io::{self, IsTerminal, Stdout, Write, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossterm::event::{self, Event, KeyCode, KeyModifiers};
use crossterm::terminal::{self, ClearType, EnterAlternateScreen, LeaveAlternateScreen};
use crossterm::{cursor, execute, queue, style};
use nowait_cli::error::{CliError, os_message, plain};
use nowait_cli::size::short;
use nowait_control::{Client, ClientError, ConnectionInfo, ExportInfo, ServerInfo};
use serde_json::json;
use signal_hook::consts::{SIGHUP, SIGTERM};

use crate::args::control_args::ServerArgs;
use crate::args::top_args::TopArgs;
use crate::commands::control::{duration, failed};
use crate::control_client::the_client;
use crate::load::{self, Load};
use crate::output;

/// The time between two questions.
const PERIOD: Duration = Duration::from_secs(1);
/// How soon a signal is noticed.
const SIGNAL_CHECK: Duration = Duration::from_millis(200);
/// The longest line without a terminal, in characters.
const MAX_WIDTH: usize = 400;

/// A server at one moment.
struct Moment {
    at: Instant,
    server: ServerInfo,
    exports: Vec<ExportInfo>,
    connections: Vec<ConnectionInfo>,
}

/// Shows the server of `args` until told to end, or once.
///
/// # Errors
/// There is no server, it answers no more, or the terminal cannot be set up.
pub(crate) fn run(args: &TopArgs) -> Result<(), CliError> {
    let client = the_client(&args.server)?;
    let before = ask(&client).map_err(|error| failed(client.place(), &error))?;
    if args.once || args.server.json || !stdout().is_terminal() {
        std::thread::sleep(PERIOD);
        let now = ask(&client).map_err(|error| failed(client.place(), &error))?;
        return match args.server.json {
            true => output::print(json_of(&before, &now)),
            false => output::print(page(&before, &now).join("\n") + "\n"),
        };
    }
    let no_screen =
        |error: io::Error| CliError::new(format!("the terminal: {}", os_message(&error)));
    let mut screen = Screen::enter().map_err(no_screen)?;
    let shown = show(&mut screen, &args.server, client, before);
    drop(screen);
    shown
}

/// Draws each second until told to end.
fn show(
    screen: &mut Screen,
    args: &ServerArgs,
    mut client: Client,
    mut before: Moment,
) -> Result<(), CliError> {
    let no_screen =
        |error: io::Error| CliError::new(format!("the terminal: {}", os_message(&error)));
    let mut lines = vec!["nowait: the first second".to_owned()];
    loop {
        screen.draw(&lines).map_err(no_screen)?;
        if screen.is_to_end(&lines).map_err(no_screen)? {
            return Ok(());
        }
        let now = match ask(&client) {
            Ok(now) => now,
            // After an upgrade another process answers, perhaps at another socket.
            Err(_) => {
                client = the_client(args)?;
                ask(&client).map_err(|error| failed(client.place(), &error))?
            }
        };
        lines = page(&before, &now);
        before = now;
    }
}

fn ask(client: &Client) -> Result<Moment, ClientError> {
    let (server, exports) = (client.server()?, client.exports()?);
    Ok(Moment { at: Instant::now(), server, exports, connections: client.connections()? })
}

/// What each export has done between two moments.
fn loads(before: &Moment, now: &Moment) -> Vec<Load> {
    let seconds = (now.at - before.at).as_secs_f64().max(1e-3);
    let old = |id| before.exports.iter().find(|export| export.id == id);
    now.exports.iter().map(|export| Load::between(old(export.id), export, seconds)).collect()
}

fn json_of(before: &Moment, now: &Moment) -> String {
    let value = json!({
        "server": now.server,
        "exports": loads(before, now),
        "connections": now.connections,
    });
    format!("{value}\n")
}

/// The lines of the screen.
fn page(before: &Moment, now: &Moment) -> Vec<String> {
    let loads = loads(before, now);
    let ServerInfo { version, pid, uptime_seconds, connections, max_connections, .. } = &now.server;
    let up = duration(*uptime_seconds as u64);
    let mut lines = vec![
        format!(
            "nowait {}, process {pid}, up {up}, {connections} of {max_connections} connections",
            plain(version)
        ),
        String::new(),
        format!(
            "{:<20} {:>9} {:>10} {:>9} {:>9} {:>9} {:>9} {:>7} {:>7} {:>7}  IMAGE",
            "EXPORT",
            "SIZE",
            "REQUESTS/S",
            "READ MB/S",
            "WRIT MB/S",
            "P50",
            "P99",
            "FLIGHT",
            "CLIENTS",
            "ERRORS"
        ),
    ];
    for (export, load) in now.exports.iter().zip(&loads) {
        let name = if load.name.is_empty() { format!("@{}", load.id) } else { plain(&load.name) };
        let place = plain(&export.image);
        lines.push(row(&name, &short(export.size_bytes), load) + "  " + &place);
    }
    if loads.len() > 1 {
        lines.push(row("all", "", &Load::sum(&loads)));
    }
    let paths = load::paths(&before.exports, &now.exports);
    let paths: Vec<_> = paths.iter().map(|(name, part)| format!("{name} {part:.1} %")).collect();
    if !paths.is_empty() {
        lines.extend([String::new(), format!("served by: {}", paths.join(", "))]);
    }
    lines.push(String::new());
    lines.push(format!(
        "{:>10} {:<11} {:<20} {:>12}  CLIENT",
        "CONNECTION", "FRONTEND", "EXPORT", "FOR"
    ));
    lines.extend(now.connections.iter().map(connection_row));
    lines.iter_mut().for_each(|line| *line = cut(line, MAX_WIDTH));
    lines
}

fn row(name: &str, size: &str, load: &Load) -> String {
    format!(
        "{:<20} {size:>9} {:>10.0} {:>9.1} {:>9.1} {:>9} {:>9} {:>7} {:>7} {:>7}",
        cut(name, 20),
        load.requests_per_second,
        load.read_bytes_per_second / 1e6,
        load.written_bytes_per_second / 1e6,
        time(load.p50_seconds),
        time(load.p99_seconds),
        load.in_flight,
        load.members,
        load.errors,
    )
}

fn connection_row(connection: &ConnectionInfo) -> String {
    let export = match connection.export.as_deref() {
        None => "(handshake)".into(),
        Some("") => "(default)".into(),
        Some(name) => cut(&plain(name), 20),
    };
    format!(
        "{:>10} {:<11} {export:<20} {:>12}  {}{}",
        connection.id,
        plain(&connection.frontend),
        duration(connection.age_seconds as u64),
        plain(&connection.peer),
        if connection.tls { ", TLS" } else { "" },
    )
}

fn time(seconds: Option<f64>) -> String {
    match seconds {
        None => "-".into(),
        Some(seconds) if seconds < 1e-3 => format!("{:.0} us", seconds * 1e6),
        Some(seconds) if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        Some(seconds) => format!("{seconds:.1} s"),
    }
}

fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// The terminal, in a state that the user does not keep.
struct Screen {
    out: Stdout,
    /// A signal has asked for the end.
    told: Arc<AtomicBool>,
}

impl Screen {
    fn enter() -> io::Result<Self> {
        let told = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, told.clone())?;
        }
        terminal::enable_raw_mode()?;
        let mut screen = Self { out: stdout(), told };
        execute!(screen.out, EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    /// Draws as many of `lines` as there is place for.
    fn draw(&mut self, lines: &[String]) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let (width, height) = (usize::from(width), usize::from(height));
        for (at, line) in lines.iter().take(height).enumerate() {
            let to = cursor::MoveTo(0, at.try_into().unwrap_or(u16::MAX));
            let rest = terminal::Clear(ClearType::UntilNewLine);
            queue!(self.out, to, style::Print(cut(line, width)), rest)?;
        }
        if lines.len() < height {
            let to = cursor::MoveTo(0, lines.len().try_into().unwrap_or(u16::MAX));
            queue!(self.out, to, terminal::Clear(ClearType::FromCursorDown))?;
        }
        self.out.flush()
    }

    /// Waits a period, and draws `lines` again where the size changes. Whether the user or a signal
    /// wants the end.
    fn is_to_end(&mut self, lines: &[String]) -> io::Result<bool> {
        let until = Instant::now() + PERIOD;
        while !self.told.load(Ordering::Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(false);
            }
            if !event::poll(left.min(SIGNAL_CHECK))? {
                continue;
            }
            match event::read()? {
                Event::Key(key) => match key.code {
                    KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Ok(true),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        return Ok(true);
                    }
                    _ => {}
                },
                Event::Resize(..) => self.draw(lines)?,
                _ => {}
            }
        }
        Ok(true)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // The terminal may be gone.
        let _ = execute!(self.out, LeaveAlternateScreen, cursor::Show);
        let _ = terminal::disable_raw_mode();
    }
}
